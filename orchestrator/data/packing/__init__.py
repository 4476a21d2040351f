"""Packs tokens into samples: one stream per source, cut into steps."""
