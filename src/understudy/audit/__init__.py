"""Audits: what an attack really finds, against what the certificate claims.

An audit attacks the real code and turns its success into a lower bound on epsilon that holds with
95 % confidence. A bound above the claim shows a fault. One below it shows only that this attack
found none: docs/audits.md.
"""
