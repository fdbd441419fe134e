"""Model directories in Hugging Face format: what can be wrong with one, found before anything starts.

base.py      ModelError, configurations, from a hub id to its directory
tensors.py   tensors that are missing, unexpected, mis-shaped or of the wrong type
tokens.py    token ids without a row in the embedding
special.py   special tokens that a tokenizer adds by itself
templates.py messages that a chat template drops, replies that it does not ask for
files.py     everything that is not weights, copied as it came
"""
