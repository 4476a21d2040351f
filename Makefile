# Everything runs in .venv, which is made on first use. Needs Python >= 3.11 and make, nothing else.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
TOOLS := $(VENV)/.installed-tools
# the tests that start neither ray nor torch, without the search over all interleavings, which takes half a minute
FAST_TESTS := tests/config tests/planning tests/cluster tests/test_layers.py tests/launch/test_needs.py \
	$(filter-out tests/history/test_claim_search.py, $(wildcard tests/history/test_*.py)) \
	$(filter-out tests/elastic/test_search.py, $(wildcard tests/elastic/test_*.py))

# each of the tests' many processes would compile the package anew
unexport PYTHONDONTWRITEBYTECODE

.PHONY: quickstart test check chaos clean browser bench-data bench-peers

quickstart: $(STAMP)
	$(BIN)/orchestrator sample-corpus corpus/
	$(BIN)/orchestrator train configs/quickstart.yaml

# in three processes, on two cores too: one has the tests on Ray, and these often wait
test: $(TOOLS) browser
	$(BIN)/python -m pytest -m "not chaos" -n 3 --dist loadgroup --no-loadscope-reorder --durations=10

check: $(TOOLS)
	$(BIN)/ruff check .
	$(BIN)/mypy --strict
	$(BIN)/python -m pytest -q -m "not chaos and not system" $(FAST_TESTS)

# The tests of the page drive a chromium: Debian's is installed where that can be done unasked, else they skip.
browser:
	@command -v chromium >/dev/null || command -v google-chrome >/dev/null || { \
		root=; [ "$$(id -u)" = 0 ] || root="sudo -n"; \
		command -v apt-get >/dev/null 2>&1 && $$root true 2>/dev/null && \
		$$root apt-get update -qq >/dev/null 2>&1 && \
		$$root env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends chromium >/dev/null 2>&1; \
	} || echo "no chromium is here, and none could be installed: the tests of the page skip"

chaos: $(TOOLS)
	$(BIN)/python -m pytest -m chaos --timeout=1800 -n 2 --dist loadgroup --no-loadscope-reorder
	$(BIN)/python -m pytest -q -m "not chaos and not system" -n 2 --hypothesis-profile=random \
		$$(grep -l "^from hypothesis import .*given" -r tests --include="test_*.py")

bench-data: $(STAMP)
	$(BIN)/python -m benchmarks.data --json

# Other loaders in an environment of their own, which sees this one's packages: only what it lacks is installed.
PEERS := .venv-peers
bench-peers: $(STAMP)
	$(PYTHON) -m venv $(PEERS)
	$(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' \
		> "$$($(PEERS)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/beside.pth"
	for peer in torchtitan datasets torchdata grain epochraft; do \
		$(PEERS)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt $$peer \
		|| echo "$$peer does not install here"; done
	$(BIN)/python -m benchmarks.data --json --peers $(PEERS)/bin/python

# written last, so that an install that was cut off is done again
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python >= 3.11 is needed, this is " + sys.version.split()[0] + "; use make PYTHON=python3.11")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e .
	touch $@

$(TOOLS): $(STAMP)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev]"
	touch $@

clean:
	rm -rf $(VENV) $(PEERS) build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
