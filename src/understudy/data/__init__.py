"""Decoders: files and arrays in, checked `LabelledImages` out. Trusted code, below the door."""
