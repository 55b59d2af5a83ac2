# Everything a developer or CI does, by name. `make demo` and `make test` need Python 3.11+ and nothing else.
# TORCH_INDEX=URL names the index that is asked first for torch's CPU build; empty, none is: see tools/install_torch.sh.
# INSTALLER=uv: uv installs what pip would, in a third of the time; pip does where uv can't.
PYTHON ?= python3
INSTALLER ?= pip
VENV := .venv
BIN := $(VENV)/bin
PY := $(BIN)/python -P
STAMP := $(VENV)/.ready
VARIANT ?= cpu
VERSION := $(shell sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml)
PROTOS := $(shell find protos -name '*.proto')
STUBS := protos/.stubs
BASELINE := protos/baseline.binpb

export PIP_DISABLE_PIP_VERSION_CHECK := 1
# Tests start hundreds of programs: without bytecode on disk each would compile our modules again.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help setup stubs demo test test-unit test-all test-gpu chaos lint types shape guard trace docs models format baseline wheel release locks image clean

help: ## This list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-9s %s\n", $$1, $$2}'

setup: $(STAMP) $(STUBS) ## The virtual environment in .venv with everything locked in requirements/dev.txt

# Not compiled: of 16,000 modules few are ever imported. Those of torch and transformers that servers import are compiled
# here once, beside the last installations, since tests import them in several processes at once.
$(STAMP): requirements/dev.txt requirements/helm.txt pyproject.toml client/pyproject.toml client/setup.py
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(0 if v >= (3, 11) else f"Tokenpod needs Python 3.11 or newer; $(PYTHON) is {v.major}.{v.minor}: try make PYTHON=python3.11")'
	@$(PYTHON) -c 'import ensurepip' 2>/dev/null || { echo "Python's venv module is incomplete here: install it (Debian, Ubuntu: apt-get install python3-venv)" >&2; exit 1; }
	@test -x $(BIN)/python || { echo "Creating $(VENV)"; $(PYTHON) -m venv $(VENV); }
	@sh tools/install_torch.sh requirements/dev.txt $(BIN)/python -m pip
	@echo "Installing the locked dependencies (the first time takes a minute or two)"
	@{ test "$(INSTALLER)" = uv && sh tools/install_by_uv.sh requirements/dev.txt $(BIN)/python; } || \
		$(BIN)/python -m pip install -qq --no-compile --requirement requirements/dev.txt
	@$(BIN)/python -m pip install -qq --no-compile --no-deps --ignore-requires-python --requirement requirements/helm.txt
	@$(BIN)/python -P -c 'import torch, transformers.modeling_utils' & \
	$(BIN)/python -m pip install -qq --no-build-isolation --no-deps --editable . && \
	$(BIN)/python -m pip install -qq --no-build-isolation --no-deps --editable client && wait
	@touch $(STAMP) $(STUBS)

$(STUBS): $(PROTOS) client/stubs.py | $(STAMP)
	@$(PY) client/stubs.py
	@touch $(STUBS)

stubs: ## Make the protobuf stubs again
	@rm -f $(STUBS)
	@$(MAKE) --no-print-directory $(STUBS)

demo: setup ## Start the server on the embedded model and stream a completion
	@$(PY) tools/demo.py

# Three, since tests of servers often wait.
test: setup ## The tests of every change, in four processes (make test ARGS='tests/scheduler -x' for a part, in one)
	@$(PY) -m pytest $(or $(ARGS),-n 4)

test-unit: setup ## Those of them that start no process and are short
	@$(PY) -m pytest -m unit $(or $(ARGS),-n 2)

test-all: setup ## All tests that need no GPU, with all examples of property tests: an hour
	@EXAMPLES=all FUZZ_EXAMPLES=30 $(PY) -m pytest -m "not gpu" $(or $(ARGS),-n 4)

test-gpu: setup ## The tests that need a GPU, in 16 processes (make test-gpu ARGS='tests/kernels -x' for a part, in one)
	@$(PY) -m pytest -m gpu $(or $(ARGS),-n 16)

chaos: setup ## Attack real pods, and print what held (make chaos ARGS='--seed 3'; --short is a part of the tests)
	@PYTHONPATH=tests $(PY) -m chaos $(ARGS)

lint: setup ## Style, spelling, links, what is made from the code and stale, protos, the Dockerfile
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@git ls-files ':!src' | xargs $(BIN)/codespell
	@$(PY) tools/links.py
	@$(PY) tools/release_version.py --check
	@$(PY) client/stubs.py --check
	@$(PY) tools/settings_docs.py --check
	@$(PY) tools/chart_schema.py --check
	@$(PY) tools/models_page.py --check
	@$(BIN)/buf lint
	@$(BIN)/buf breaking --against $(BASELINE)
	@$(BIN)/hadolint Dockerfile

format: setup ## Rewrite the code in the project's style
	@$(BIN)/ruff check --fix-only --quiet .
	@$(BIN)/ruff format --quiet .

docs: setup ## What is made from the settings: their page, their part of the chart's schema
	@$(PY) tools/settings_docs.py
	@$(PY) tools/chart_schema.py
	@$(PY) tools/models_page.py

models: setup ## Try every causal model of transformers on a tiny checkpoint, and note which are served
	@PYTHONPATH=tools $(PY) -m survey
	@$(PY) tools/models_page.py

baseline: setup ## Freeze the protos as they are: what is in the baseline can't be broken any more
	@$(BIN)/buf build --exclude-source-info --output $(BASELINE)

types: setup ## mypy --strict, and pyright over what programs import
	@$(PY) -m mypy
	@$(BIN)/basedpyright

shape: setup ## Lines of each package, and cycles of imports: fails on one that tests/import_cycles.txt does not list
	@$(PY) tools/shape.py $(ARGS)

guard: setup ## The host's work beside another commit's, by turns (make guard BEFORE=v0.2.0 ARGS='--parts planning encoding')
	@$(PY) benchmarks/run.py guard --against $(or $(BEFORE),HEAD) $(ARGS)

trace: setup ## The product's files and classes that one plain streaming Generate runs through
	@$(PY) tools/trace_path.py $(ARGS)

# Neither needs the environment of development: pip alone builds, in environments of its own, with what is locked for that.
PACK := build/pack
wheel release: export SOURCE_DATE_EPOCH = $(shell git log -1 --format=%ct)

$(PACK)/bin/python:
	@$(PYTHON) -m venv $(PACK)

wheel: $(PACK)/bin/python ## dist/*.whl: the server's wheel, and the client's
	@rm -rf build/lib build/bdist.* client/build dist/tokenpod-*.whl dist/tokenpod_client-*.whl
	@sed -n 's/^\([a-z-]*==[^ ]*\).*/\1/p' requirements/build.txt > $(PACK)/versions.txt
	@for name in PIP_CONSTRAINT PIP_BUILD_CONSTRAINT; do export "$$name=$(CURDIR)/$(PACK)/versions.txt"; done; \
		$(PACK)/bin/python -m pip wheel --quiet --no-deps --wheel-dir dist ./client .

release: ## dist/: both wheels, the chart, bills of materials of what the images install, SHA256SUMS of all
	@rm -rf dist
	@$(MAKE) --no-print-directory wheel
	@$(PACK)/bin/python -m pip install --quiet --require-hashes --no-deps --requirement requirements/sbom.txt
	@for variant in cpu cuda; do PYTHONWARNINGS=ignore $(PACK)/bin/cyclonedx-py requirements --pyproject pyproject.toml --output-reproducible \
		--output-format JSON --output-file dist/tokenpod-$(VERSION)-$$variant.cdx.json requirements/runtime-$$variant.txt || exit; done
	@tar --sort=name --mtime=@$$SOURCE_DATE_EPOCH --owner=0 --group=0 --numeric-owner --mode=u=rwX,go=rX --directory deploy/helm \
		--create --gzip --file dist/tokenpod-chart-$(VERSION).tgz tokenpod
	@cd dist && sha256sum * > SHA256SUMS && cat SHA256SUMS

# uv looks where its own settings say (UV_INDEX, UV_FIND_LINKS): one of them must name where torch's CPU builds are.
COMPILE := $(BIN)/uv pip compile --quiet --custom-compile-command 'make locks' --no-annotate --generate-hashes --no-emit-package tokenpod-client \
	--python-version 3.11 --python-platform x86_64-manylinux_2_28 --constraints build/pins.txt
locks: setup ## requirements/ but for dev.txt, from both pyproject.toml and the versions of dev.txt, for the image's Python
	@mkdir -p build
	@sed 's/^torch==.*/&+cpu/' requirements/dev.txt > build/pins.txt
	@$(COMPILE) --extra s3 --extra vllm pyproject.toml --output-file requirements/runtime-cpu.txt
	@sed 's/^torch==\(.*\)/&,!=\1+cpu/' requirements/dev.txt > build/pins.txt
	@$(COMPILE) --extra s3 --extra vllm --extra gpu pyproject.toml --output-file requirements/runtime-cuda.txt
	@$(COMPILE) requirements/build.in --output-file requirements/build.txt
	@$(COMPILE) requirements/sbom.in --output-file requirements/sbom.txt

# DOCKER=podman, IMAGE_ARGS='--build-arg PIP_INDEX_URL=...': the engine, and what its build is given.
DOCKER ?= docker
image: ## Build an image, look into it, and generate with it (VARIANT=cpu or cuda)
	@$(DOCKER) build --tag tokenpod:$(VERSION)-$(VARIANT) --build-arg VARIANT=$(VARIANT) --build-arg VERSION=$(VERSION) \
		--build-arg REVISION=$$(git rev-parse HEAD) $(IMAGE_ARGS) .
	@DOCKER='$(DOCKER)' $(PYTHON) tools/image.py try tokenpod:$(VERSION)-$(VARIANT)

clean: ## Remove what the build made
	@rm -rf $(VENV) build client/build dist src/*.egg-info client/src/*.egg-info $(STUBS) .mypy_cache .ruff_cache .pytest_cache
	@find protos -name '*_pb2*' -delete
