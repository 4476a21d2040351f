"""The project's `configs/` for a small corpus and short tests: a smaller model in each, which may read that
corpus more than once, train longer, and report more often.
"""

from __future__ import annotations

from pathlib import Path

import yaml

from tests.conftest import TOKENIZER_VOCAB

CONFIGS = Path(__file__).resolve().parents[1] / "configs"
# files of other programs
DEPLOYMENTS = {
    "kuberay-raycluster.yaml",
    "kuberay-rayjob.yaml",
    "prometheus-alerts.yaml",
    "skypilot.yaml",
}
JOBS = sorted(path for path in CONFIGS.glob("*.yaml") if path.name not in DEPLOYMENTS)
SMALL = {"vocab_size": TOKENIZER_VOCAB, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}


def write_small_configs(folder: Path) -> None:
    """Each as a file of the same name."""
    folder.mkdir()
    for path in JOBS:
        job = yaml.safe_load(path.read_text())
        job["model"]["config"].update(SMALL)
        job["data"]["num_epochs"] = None
        job["train"]["max_steps"] *= 10  # what a document says it has time for, also where steps are short
        job["monitor"] = {"progress_s": 0.2}
        (folder / path.name).write_text(yaml.safe_dump(job))
