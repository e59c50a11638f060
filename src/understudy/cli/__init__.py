"""The command line: parse, call the library, print. Thin on purpose."""
