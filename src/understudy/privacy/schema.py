"""The tables of the ledger, and what each format has added."""

from __future__ import annotations

FORMAT = 4
SCHEMA = """
CREATE TABLE meta (key TEXT PRIMARY KEY, value BLOB NOT NULL) STRICT;
CREATE TABLE data_sets (
  id INTEGER PRIMARY KEY, name TEXT NOT NULL UNIQUE, budget INTEGER NOT NULL, digest BLOB NOT NULL,
  pixels BLOB NOT NULL, source TEXT, facts TEXT NOT NULL, relation TEXT NOT NULL,
  lineage TEXT NOT NULL, lifetime_epsilon REAL,
  is_public_benchmark INTEGER NOT NULL, hold_out REAL NOT NULL, secret BLOB NOT NULL,
  registered REAL NOT NULL) STRICT;
CREATE TABLE runs (
  id TEXT PRIMARY KEY, data_set INTEGER NOT NULL REFERENCES data_sets, method TEXT NOT NULL,
  plan TEXT NOT NULL, noise_multiplier REAL NOT NULL, epsilon REAL, delta REAL NOT NULL,
  accountant TEXT NOT NULL, delta_tail REAL NOT NULL, divergence REAL, state TEXT NOT NULL,
  certificate TEXT, reserved REAL NOT NULL) STRICT;
CREATE TABLE blocks (
  run TEXT NOT NULL REFERENCES runs, number INTEGER NOT NULL, attempts INTEGER NOT NULL,
  state TEXT NOT NULL, releases TEXT, digest TEXT, PRIMARY KEY (run, number)) STRICT;
CREATE TABLE disclosures (
  id INTEGER PRIMARY KEY, data_set INTEGER REFERENCES data_sets, what TEXT NOT NULL,
  purpose TEXT NOT NULL, disclosed REAL NOT NULL) STRICT;
"""
IMAGES_SCHEMA = """
CREATE TABLE images (
  tag BLOB NOT NULL, data_set INTEGER NOT NULL REFERENCES data_sets, PRIMARY KEY (tag, data_set)
) STRICT, WITHOUT ROWID
"""
"""Keyed digests of single images, since format 2: they show that two sets share records."""
ROUNDS_SCHEMA = """
CREATE TABLE rounds (
  run TEXT NOT NULL REFERENCES runs, name TEXT NOT NULL, question BLOB NOT NULL, answer BLOB,
  answered REAL NOT NULL, PRIMARY KEY (run, name)) STRICT
"""
"""What a client of a federation answered, since format 3; old answers are emptied."""
HISTORY_SCHEMA = """
CREATE TABLE IF NOT EXISTS history (
  number INTEGER PRIMARY KEY, head BLOB NOT NULL, lost INTEGER NOT NULL) STRICT
"""
"""Every state of the ledger, since format 4; `lost` numbers before it went with a lost file."""
ADDED = {2: IMAGES_SCHEMA, 3: ROUNDS_SCHEMA, 4: HISTORY_SCHEMA}

SUMMED = {
    "entries": ("data_sets", "runs", "blocks", "disclosures", "rounds"),
    "images": ("images",),
}
"""Tables by the sum that they are in. The many images are summed apart: not at every opening."""
