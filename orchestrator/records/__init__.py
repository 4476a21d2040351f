"""Frozen values that are exchanged between processes or stored. `json_form` encodes those in storage."""
