from tests.pages.blocks import Block


def is_of_a_session(block: Block) -> bool:
    return block.language == "bash" or block.is_output
