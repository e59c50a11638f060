"""The door: the only code that touches a record. Review this folder to review the guarantee."""
