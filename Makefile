# make test [PLATFORM=mindspore]          the gate: the tests that judge a change, of all backends or one, with coverage
# make test FILES="tests/conformance/test_styles.py tests/unit/test_gate.py"   these alone, where they belong; with PLATFORM= too
# make test PLATFORM=torch-cpu TORCH=2.14.1   those of a backend of torch with another release of it
# make test-npu                           those of torch-npu, on simulated NPUs
# make readme-table                       the README's table of backends, from the last run of the tests, which must be of HEAD; that of docs/gates.md
# make demo [PLATFORM=mindspore] [TP=2] [DP=1] [MOE=1]   train a small Llama on DP x TP processes; with MOE=1 four experts, of DP=2, TP=1
# make bench [CASES=mlp] [OUT=NAME]       measure costs, under benchmarks/results/; minutes, on an idle machine
# make fuzz [N=100000] [PLATFORM=mindspore] [KIND=training]   random programs with fresh seeds, recorded in ci/last_fuzz.json
# make nightly [PLATFORM=mindspore] [N=100] [SEED=1] [PARTS="unit mindspore"]   everything, recorded in ci/last_nightly.json; hours
# make mutants [N=200] [SEED=1] [PLATFORM=mindspore]   which small changes of the code the gate misses, and which all tests; hours
# make lint                               ruff, mypy, and ci/wording.py, which counts wordings that make readers read twice
# make docs                               the site, under build/site; a warning is an error
# make dist                               wheel and source distribution, checked, under build/dist
# make newcomer [WITHOUT_MINDSPORE=yes]   the wheel in an empty environment, as somebody new would use it; minutes
# make clean                              remove environments and build output
# make help                               this list
#
# Each target makes the virtual environment it needs under .venv/, and makes it again when its requirements change.
# PYTHON chooses the interpreter, PIP_ARGS goes to every `pip install`, TORCH chooses the release of torch (and torch_npu).

PYTHON := python3
PLATFORM :=
TORCH :=
FILES :=
MOE :=
TP := $(if $(MOE),1,2)
DP := $(if $(MOE),2,1)
PIP_ARGS :=

# The backends that need nothing but a CPU, and all that have a folder of requirements.
CPU_PLATFORMS := torch-cpu mindspore
PLATFORMS := $(patsubst platform/%/requirements.txt,%,$(wildcard platform/*/requirements.txt))

ifneq ($(filter-out $(PLATFORMS),$(PLATFORM)),)
$(error PLATFORM=$(PLATFORM) is none of: $(PLATFORMS))
endif

ifneq ($(TORCH),)
ifeq ($(filter torch-%,$(PLATFORM)),)
$(error TORCH=$(TORCH) chooses the torch of one backend: set PLATFORM too, to one of: $(filter torch-%,$(PLATFORMS)))
endif
ifeq ($(shell echo '$(TORCH)' | grep -E '^[0-9]+(\.[0-9]+)+$$'),)
$(error TORCH=$(TORCH) is no release of torch, such as 2.14.1)
endif
endif

DEMO_PLATFORM := $(or $(PLATFORM),torch-cpu)
# The oldest torch that is supported, which is the quickest to install: see docs/dependencies.md.
DEMO_TORCH := $(or $(TORCH),$(if $(filter torch-cpu,$(DEMO_PLATFORM)),2.13.0))
DEMO_ENVIRONMENT := $(DEMO_PLATFORM)$(addprefix -,$(DEMO_TORCH))

# Without a GPU the tests of torch-cuda use fake tensors, for which the torch of torch-cpu will do.
ENVIRONMENT := $(PLATFORM)
ifeq ($(PLATFORM)$(shell command -v nvidia-smi),torch-cuda)
ENVIRONMENT := torch-cpu
endif
BACKEND_OF_ENVIRONMENT := $(ENVIRONMENT)
ENVIRONMENT := $(ENVIRONMENT)$(addprefix -,$(TORCH))

.PHONY: help test test-npu readme-table demo bench fuzz nightly mutants lint docs dist newcomer clean

# Says every ten seconds what is being done, and for how long.
SAYING := $(PYTHON) ci/heartbeat.py

# The first target, so that `make` alone says what there is.
help:
	@sed -n 's/^# \(make .*\)/\1/p' $(firstword $(MAKEFILE_LIST))

ifeq ($(PLATFORM),)
# Of some files only those of torch-npu need its environment.
ALSO_NPU := $(if $(FILES),$(filter tests/conformance% tests/torch% tests/npu%,$(patsubst ./%,%,$(FILES))),yes)
# torch-npu has no wheels for some machines: there the gate says so, and fails when CI is set.
define environments
+@$(MAKE) --no-print-directory -j2 -k .venv/all/.ready $(if $(ALSO_NPU),.venv/torch-npu/.ready) || echo "an environment is missing: see above"
+@$(MAKE) --no-print-directory .venv/all/.ready
endef
test:
	$(environments)
	PYTHON=$(CURDIR)/.venv/all/bin/python PYTHON_NPU=$(CURDIR)/.venv/torch-npu/bin/python ci/all $(if $(FILES),--files $(FILES))
else
test: .venv/$(ENVIRONMENT)/.ready
	PYTHON=$(CURDIR)/.venv/$(ENVIRONMENT)/bin/python ci/$(PLATFORM) $(if $(FILES),--files $(FILES))
endif

test-npu:
	@$(MAKE) --no-print-directory test PLATFORM=torch-npu

readme-table:
	$(PYTHON) ci/nightly_table.py
	$(PYTHON) ci/table.py

# Without CANN, NPUs are simulated.
DEMO_PYTHON := .venv/$(DEMO_ENVIRONMENT)/bin/python
ifeq ($(DEMO_PLATFORM)$(ASCEND_HOME_PATH),torch-npu)
DEMO_PYTHON += -m tests.simulated_npu run $(DEMO_PYTHON)
endif
DEMO_SIZES := --tp $(TP) --dp $(DP) $(if $(MOE),--experts 4)
demo: .venv/$(DEMO_ENVIRONMENT)/.ready
	HYPER_PARALLEL_PLATFORM=$(DEMO_PLATFORM) $(DEMO_PYTHON) examples/train_llama/train.py $(DEMO_SIZES)

CASES :=
OUT := benchmarks/results/$(shell uname -m)-$(shell getconf _NPROCESSORS_ONLN)-cores
bench: .venv/all/.ready
	HYPER_PARALLEL_PLATFORM=torch-cpu .venv/all/bin/python -m benchmarks $(CASES) --out $(OUT)

N :=
SEED := 1
fuzz: .venv/all/.ready
	.venv/all/bin/python -m hyper_parallel.testing.fuzz $(or $(PLATFORM),torch-cpu) --count $(or $(N),1000) \
	    --kind $(or $(KIND),operations) --record ci/last_fuzz.json
	.venv/all/bin/python -m ci.figures --write

PARTS :=
NIGHTLY := --more $(or $(N),100) $(if $(filter command line,$(origin SEED)),--seed $(SEED)) $(if $(PARTS),--parts $(PARTS))
ifeq ($(PLATFORM),)
nightly:
	$(environments)
	.venv/all/bin/python ci/nightly.py torch-cpu mindspore torch-npu=$(CURDIR)/.venv/torch-npu/bin/python torch-cuda $(NIGHTLY)
else
nightly: .venv/$(ENVIRONMENT)/.ready
	.venv/$(ENVIRONMENT)/bin/python ci/nightly.py $(PLATFORM) $(NIGHTLY)
endif

mutants: .venv/all/.ready
	.venv/all/bin/python -m ci.mutants --count $(or $(N),200) --seed $(SEED) $(addprefix --backend=,$(PLATFORM))
	.venv/all/bin/python -m ci.figures --write

lint: .venv/lint/.ready
	.venv/lint/bin/ruff check .
	$(PYTHON) ci/wording.py
	$(SAYING) mypy .venv/lint/bin/mypy

docs: .venv/docs/.ready
	NO_MKDOCS_2_WARNING=1 $(SAYING) "making the site" .venv/docs/bin/mkdocs build --strict --clean

dist: .venv/dist/.ready
	rm -rf build/dist build/lib
	.venv/dist/bin/python -m build --outdir build/dist .
	.venv/dist/bin/python -m twine check --strict build/dist/*

newcomer: dist
	PYTHON=$(PYTHON) PIP_ARGS="$(PIP_ARGS)" ci/newcomer build/dist/*.whl $(if $(WITHOUT_MINDSPORE),--without-mindspore)

clean:
	rm -rf .venv build

# $(call environment,NAME,REQUIREMENT FILES,FURTHER ARGUMENTS OF PIP): a rule for .venv/NAME.
# The file .ready is newer than the requirements exactly when the environment fits them.
define environment
.venv/$(1)/.ready: $(2) pyproject.toml
	$(SAYING) "beginning .venv/$(1)" $(PYTHON) -m venv .venv/$(1)
	$(SAYING) --folder .venv/$(1) "making .venv/$(1)" .venv/$(1)/bin/python -m pip install --quiet $(PIP_ARGS) $(addprefix -r ,$(2)) $(3)
	touch $$@
endef

# $(call other_torch,BACKEND,TORCH): a rule for .venv/BACKEND-TORCH, which has this torch in place of the gate's.
define other_torch
.venv/$(1)-$(2)/.ready: platform/$(1)/requirements.txt ci/requirements-test.txt pyproject.toml
	$(SAYING) "beginning .venv/$(1)-$(2)" $(PYTHON) -m venv .venv/$(1)-$(2)
	sed -E 's/^(torch|torch-npu)==.*/\1==$(2)/' $$< > .venv/$(1)-$(2)/requirements.txt
	$(SAYING) --folder .venv/$(1)-$(2) "making .venv/$(1)-$(2)" \
	    .venv/$(1)-$(2)/bin/python -m pip install --quiet $(PIP_ARGS) -r .venv/$(1)-$(2)/requirements.txt \
	    -r ci/requirements-test.txt -e .
	touch $$@
endef

requirements = $(patsubst %,platform/%/requirements.txt,$(1)) ci/requirements-test.txt
$(eval $(call environment,all,$(call requirements,$(CPU_PLATFORMS)),-e .))
$(foreach name,$(PLATFORMS),$(eval $(call environment,$(name),$(call requirements,$(name)),-e .)))
$(eval $(call environment,lint,ci/requirements-lint.txt,))
$(eval $(call environment,docs,ci/requirements-docs.txt,))
$(eval $(call environment,dist,ci/requirements-dist.txt,))
$(if $(TORCH),$(eval $(call other_torch,$(BACKEND_OF_ENVIRONMENT),$(TORCH))))
$(if $(DEMO_TORCH),$(if $(filter $(DEMO_ENVIRONMENT),$(ENVIRONMENT)),,$(eval $(call other_torch,$(DEMO_PLATFORM),$(DEMO_TORCH)))))
