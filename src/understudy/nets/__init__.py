"""Networks as pure functions: a frozen description, `init`, and a call on explicit parameters."""
