"""Continual learning: stages with records of different parties, joined by what each releases.

A stage is an ordinary run: its own registration, plan, ledger entry and certificate. What goes from
party to party is the released folder alone. After each stage a fresh classifier is trained on all
sets released so far, joined by the names of their classes: see docs/continual.md.
"""
