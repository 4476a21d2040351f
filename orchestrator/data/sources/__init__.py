"""From paths to records: which files, how they are cut, and their records in windows."""
