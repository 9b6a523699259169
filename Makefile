# Everything a developer or CI runs. `make` alone lists the targets.
#
#   make demo URL=s3://bucket/prefix      the demo on a bucket of yours (credentials as s3fs finds them)
#   make test PYTEST_ARGS="-k sharding"   some tests only
#   PYTHON=/path/to/python3.12 make setup another interpreter

VENV ?= .venv
VENV_OLD ?= .venv-0.31
VLLM ?= 0.32.0
VLLM_OLD ?= 0.31.0
PY := $(VENV)/bin/python
URL ?=
PYTEST_ARGS ?=
FUZZ_BYTES ?= 1e7
comma := ,

# The demo's and the tests' servers are on this machine: a proxy that is set for the index must not get in between.
export no_proxy := 127.0.0.1,localhost$(if $(no_proxy),$(comma)$(no_proxy))
export NO_PROXY := $(no_proxy)

.DEFAULT_GOAL := help
.PHONY: help setup setup-old setup-ceph demo demo-s3 test test-all lint fmt bench bench-quick bench-timeline fuzz faults soak clean distclean

help: ## list the targets
	@sed -n 's/^\([a-z0-9-]*\):.*## \(.*\)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 20

setup: ## make .venv with vLLM's CPU build and this project (2-3 minutes once, then a second)
	@tools/setup_venv.sh $(VENV) $(VLLM)

setup-old:
	@tools/setup_venv.sh $(VENV_OLD) $(VLLM_OLD)

setup-ceph:
	@tools/setup_ceph.sh

demo: setup ## offload at TP=4, reload at TP=2 with a real vLLM server [URL=s3://...]
	@$(PY) tools/demo.py $(if $(URL),--url '$(URL)')

demo-s3: setup ## the demo on a real S3 server that it starts itself [or URL=s3://...]
	@$(PY) tools/demo.py --s3 $(if $(URL),--url '$(URL)')

lint: setup ## ruff and mypy
	@echo "== ruff check";  $(PY) -m ruff check .
	@echo "== ruff format"; $(PY) -m ruff format --check .
	@echo "== mypy";        $(PY) -m mypy

fmt: setup ## let ruff format and fix what it can
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

test: lint ## lint and every test but the slow ones (under 35 minutes on 2 cores)
	@echo "== pytest"; $(PY) -m pytest -m "not slow and not ceph" $(PYTEST_ARGS)

test-all: lint setup-old setup-ceph ## every test, then those of `make test` that start vLLM on vLLM 0.31 (under 80 minutes)
	@echo "== pytest on vLLM $(VLLM)"; $(PY) -m pytest $(PYTEST_ARGS)
	@echo "== pytest on vLLM $(VLLM_OLD)"; $(VENV_OLD)/bin/python -m pytest -m "vllm and not slow" $(PYTEST_ARGS)

bench: setup ## measure copies, digests, stores and lookups against what the machine can do, and keep the results
	@PYTHONPATH=tools $(PY) -m bench

bench-quick: setup ## the same in five minutes: fewer rounds, smaller stores
	@PYTHONPATH=tools $(PY) -m bench --quick

bench-timeline: setup ## where the time of a reload goes: a table, and a picture in tools/bench/results (two minutes)
	@PYTHONPATH=tools $(PY) -m bench.timeline

fuzz: setup ## feed mutated files to everything that reads files of others [FUZZ_BYTES=1e9]
	@$(PY) tools/fuzz.py --bytes $(FUZZ_BYTES)

faults: setup ## break the store, the network, processes and files around real servers, and judge every answer (40 minutes)
	@$(PY) tools/faults.py

soak: setup ## half an hour of traffic on a store that breaks: does anything of a server grow?
	@$(PY) tools/soak.py

clean: ## remove what tests and tools left here, but not the environments
	rm -rf .demo .bench build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find tplayout connectors tools tests -name __pycache__ -type d -prune -exec rm -rf {} +

distclean: clean ## clean, and remove the environments and the models too
	rm -rf .models $(VENV) $(VENV_OLD)
