"""Order-independent checksums of records, files and epochs."""
