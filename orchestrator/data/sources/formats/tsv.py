"""`tsv`: like `csv`, with tabs between the fields."""

from orchestrator.data.sources.formats.base import Format
from orchestrator.data.sources.formats.csv import Csv

FORMAT: Format = Csv("tsv", "\t")
