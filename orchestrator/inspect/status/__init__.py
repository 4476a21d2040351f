"""The state of a run and its missing files, as judged by commands, page and notebook."""
