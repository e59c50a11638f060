"""Training on public or synthetic images: pure step functions and the loops around them."""
