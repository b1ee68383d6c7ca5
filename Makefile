# Everything a person types. `make` alone lists it.

SHELL := /bin/sh
PY := .venv/bin/python
# Only what was asked for: `make demo CHECK=1` is an argument of make, not a variable to leak elsewhere.
unexport MAKEFLAGS

.PHONY: help setup demo test bench campaign screens lint format lock audit migrations settings clean

help: ## list these
	@sed -n 's/^\([a-z]*\):.*## /\1\t/p' Makefile | expand -t 14

setup: ## create .venv and install everything into it
	@scripts/setup.sh

demo: setup ## show the whole loop on a recorded failure (LIVE=1: train for real; CHECK=1: play both people)
	@$(if $(LIVE),scripts/setup.sh live)
	@exec env $(if $(LIVE),LIVE=$(LIVE)) $(if $(CHECK),CHECK=$(CHECK)) $(PY) -m demo

test: setup ## every check: lint, types, imports, migrations, deployment, tests on real servers
	@scripts/check.sh $(ARGS)

bench: setup ## measure against a bare view and MLflow (ARGS="ingest storm": only these)
	@exec $(PY) -m benchmarks $(ARGS)

campaign: setup ## faults on live ranks, each judged: rank, step, phase (ARGS="ddp pipeline": only these)
	@scripts/setup.sh live
	@exec $(PY) -m campaign $(ARGS)

screens: setup ## screenshots of the demo for README and docs
	@exec $(PY) -m demo.screens

lint: setup ## the static checks of `make test`
	@scripts/check.sh --static

format: setup ## bring the sources into shape
	@.venv/bin/ruff check --fix . ; .venv/bin/ruff format .

lock: setup ## compile requirements*.in into requirements*.txt with hashes
	@scripts/lock.sh

audit: setup ## ask an advisory service about every locked package (needs the network)
	@scripts/audit.sh $(ARGS)

migrations: setup ## write the initial migrations anew from the models (nothing is released yet)
	@$(PY) scripts/squash_migrations.py

settings: setup ## write docs/settings.md anew from config/settings.py
	@$(PY) -m config.settings_table > docs/settings.md

clean: ## remove .venv and caches; var/ stays
	@rm -rf .venv .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
