# `make serve` and `make test` need nothing but Python 3.11 or later: they make .venv themselves.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
export PYTHONPATH := $(CURDIR)

.PHONY: help serve test lint bench crash crash-export clean

help:
	@echo "make serve   start the broker here, with all protocols on 127.0.0.1"
	@echo "make test    lint, types and all tests"
	@echo "make bench   the benchmarks, as one table (AREAS=\"figg tank\" for some)"
	@echo "make crash N=1000          kill and restart the broker N times"
	@echo "make crash-export N=50     kill and restart the Spark exporter N times"

serve: $(VENV)/serve.stamp
	@$(BIN)/multibroker serve --development $(ARGS)

test: $(VENV)/test.stamp lint
	@$(BIN)/python -m tests

lint: $(VENV)/test.stamp
	$(BIN)/flake8 multibroker twisted tests bench setup.py
	$(BIN)/isort --check-only --quiet multibroker twisted tests bench setup.py
	$(BIN)/mypy --config-file tox.ini multibroker twisted/plugins

bench: $(VENV)/test.stamp
	@$(BIN)/python -m bench $(AREAS)

crash: $(VENV)/serve.stamp
	@CRASH_KILLS=$(or $(N),1000) $(BIN)/python -m twisted.trial tests.integration.test_crash tests.integration.test_figg_crash

crash-export: $(VENV)/test.stamp
	@CRASH_EXPORT_KILLS=$(or $(N),50) $(BIN)/python -m twisted.trial tests.spark.test_crash

$(VENV)/serve.stamp: setup.py tools/prepare
	@tools/prepare serve $(PYTHON) $(VENV)
	@touch $@

$(VENV)/test.stamp: setup.py tools/prepare
	@tools/prepare test $(PYTHON) $(VENV)
	@touch $@ $(VENV)/serve.stamp

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .hypothesis _trial_temp*
