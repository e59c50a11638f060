"""The door: the only code that touches a record. To review the guarantee is to review this folder."""
