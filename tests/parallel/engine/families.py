"""Small models of Hugging Face, made from a configuration: no weights are fetched."""

import os
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from torch import nn

WORDS = 32


def of_family(family: str, vocab: int = WORDS, **options: Any) -> Any:
    """A decoder of the kind of Llama."""
    import transformers

    settings = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 4, "num_key_value_heads": 2}
    settings |= {"pad_token_id": None, "bos_token_id": 1, "eos_token_id": 2, "use_cache": False} | options
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(vocab_size=vocab, num_hidden_layers=2, **settings)
    return getattr(transformers, f"{family}ForCausalLM")(config)


def of_kind(kind: str, *, drops: bool = False, **options: Any) -> Any:
    """A model by the name of its class, as `KINDS` has it, without dropout if it may not drop."""
    import transformers

    family, settings = KINDS[kind]
    words = {"vocab_size": WORDS, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    config = getattr(transformers, f"{family}Config")(
        **({} if "image_size" in settings else words) | settings | options
    )
    for name, value in config.to_dict().items():
        if "drop" in name and isinstance(value, float) and not drops:
            setattr(config, name, 0.0)
    torch.manual_seed(0)
    model = getattr(transformers, kind)(config)
    for module in model.modules():
        if isinstance(module, nn.Dropout) and not drops:
            module.p = 0.0
    return model


def lora(model: Any, *targets: str, **options: Any) -> Any:
    from peft import LoraConfig, get_peft_model

    wrapped = get_peft_model(model, LoraConfig(**{"r": 3, "target_modules": list(targets) or "all-linear"} | options))
    for name, parameter in wrapped.named_parameters():
        if ".lora_B." in name:
            nn.init.normal_(parameter, std=0.1)  # not zeros, where A would have no gradient in the first step
    return wrapped


class Logits(nn.Module):
    """A model in a user's own, which returns no more than its logits, those of a classifier for each word."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.inner(tokens).logits
        return logits if logits.dim() == 3 else logits[:, None].expand(-1, tokens.shape[1], -1)


class Padded(Logits):
    """The same, whose layers do not see the word of padding."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.inner(tokens, attention_mask=tokens != 0).logits
        return logits


K: dict[str, Any] = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4}
I: dict[str, Any] = {**K, "intermediate_size": 24}  # noqa: E741
G: dict[str, Any] = {"n_embd": 16, "n_layer": 2, "n_head": 4, "n_positions": 16}
OPT: dict[str, Any] = {**K, "ffn_dim": 24, "max_position_embeddings": 16}
BLOOM: dict[str, Any] = {"hidden_size": 16, "n_layer": 2, "n_head": 4}
DISTILLED: dict[str, Any] = {"dim": 16, "n_layers": 2, "n_heads": 4, "hidden_dim": 24}
BART: dict[str, Any] = {"d_model": 16, "decoder_layers": 2, "decoder_attention_heads": 4, "decoder_ffn_dim": 24}
GPT_NEO: dict[str, Any] = {"hidden_size": 16, "num_layers": 2, "num_heads": 4, "window_size": 3} | {
    "attention_types": [[["global", "local"], 1]]
}
T5: dict[str, Any] = {"d_model": 16, "num_layers": 2, "num_heads": 4, "d_kv": 4, "d_ff": 24}
IMAGES: dict[str, Any] = {**I, "image_size": 8, "patch_size": 4}

KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "GPT2LMHeadModel": ("GPT2", G),
    "GPT2ForSequenceClassification": ("GPT2", G),
    "GPT2ForTokenClassification": ("GPT2", G),
    "GPT2Model": ("GPT2", G),
    "GPT2DoubleHeadsModel": ("GPT2", G),
    "OPTForCausalLM": ("OPT", {**OPT, "word_embed_proj_dim": 8}),
    "OPTForSequenceClassification": ("OPT", {**OPT, "word_embed_proj_dim": 16}),
    "GPTNeoXForCausalLM": ("GPTNeoX", I),
    "BloomForCausalLM": ("Bloom", BLOOM),
    "BloomForSequenceClassification": ("Bloom", BLOOM),
    "FalconForCausalLM": ("Falcon", K),
    "MptForCausalLM": ("Mpt", {"d_model": 16, "n_layers": 2, "n_heads": 4, "max_seq_len": 16}),
    "BertForMaskedLM": ("Bert", I),
    "BertForSequenceClassification": ("Bert", I),
    "BertForPreTraining": ("Bert", I),
    "BertForQuestionAnswering": ("Bert", I),
    "RobertaForMaskedLM": ("Roberta", I),
    "RobertaForSequenceClassification": ("Roberta", I),
    "DistilBertForMaskedLM": ("DistilBert", DISTILLED),
    "DistilBertForSequenceClassification": ("DistilBert", DISTILLED),
    "ElectraForSequenceClassification": ("Electra", {**I, "embedding_size": 8}),
    "DebertaV2ForSequenceClassification": ("DebertaV2", I),
    "ModernBertForMaskedLM": ("ModernBert", I),
    "GPTJForCausalLM": ("GPTJ", {**G, "rotary_dim": 4}),
    "CodeGenForCausalLM": ("CodeGen", {**G, "rotary_dim": 4}),
    "GPTNeoForCausalLM": ("GPTNeo", GPT_NEO),
    "GPTBigCodeForCausalLM": ("GPTBigCode", G),
    "CTRLLMHeadModel": ("CTRL", {**G, "dff": 24}),
    "BioGptForCausalLM": ("BioGpt", I),
    "MambaForCausalLM": ("Mamba", {"hidden_size": 16, "num_hidden_layers": 2, "state_size": 4}),
    "BartForCausalLM": ("Bart", BART),
    "LlamaForSequenceClassification": ("Llama", I),
    "ViTForImageClassification": ("ViT", IMAGES),
    "AlbertForMaskedLM": ("Albert", {**I, "embedding_size": 8}),
    "MPNetForMaskedLM": ("MPNet", I),
    "RwkvForCausalLM": ("Rwkv", {"hidden_size": 16, "num_hidden_layers": 2, "attention_hidden_size": 16}),
    "T5EncoderModel": ("T5", T5),
    "T5ForConditionalGeneration": ("T5", T5),
    "BartForConditionalGeneration": ("Bart", {**BART, "encoder_layers": 2, "encoder_attention_heads": 4}),
}
"""The class of the configuration and its settings, by the class of the model."""
