"""The releases, one file each. Nothing else in the package reads a record to compute an answer."""
