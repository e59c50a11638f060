"""How good a synthetic set is: train on it, test on real records."""
