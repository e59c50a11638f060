"""Tables of papers, made again: declarative experiments, and one executor for all of them."""
