"""Hostile input for everything that reads: targets, mutations, and inputs that once broke one."""
