"""Models of Hugging Face on a mesh: their tensor-parallel and pipeline plans."""
