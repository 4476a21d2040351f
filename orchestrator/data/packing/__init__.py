"""From tokens to samples: one stream per source, cut into steps."""
