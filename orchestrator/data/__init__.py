"""From files to one canonical token stream per source."""
