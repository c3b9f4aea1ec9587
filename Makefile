# Quire's build: `make help` lists the targets. Out of tree in $(BUILD); sources are found by wildcard, so a new file needs
# no line here. What a file's name decides:
#   *_avx2.c, *_avx512*.c, *_amx.c       x86-64 only, compiled for that instruction set and entered after a run-time check
#   *_neon.c                             aarch64 only
#   tests/unit/**/test_*.c               a unit test: its own main, linked to everything but server/main.c
#   tests/fuzz/fuzz_*.c                  a libFuzzer target
#   tests/{sim,bench,tools}/*.c          a program where the file has a main, shared by the tests where it has none
# Everything else is compiled for the oldest machine that is supported (x86-64-v2), never for the machine that builds.

MAKEFLAGS += --no-builtin-rules
.SUFFIXES:
.DELETE_ON_ERROR:
.DEFAULT_GOAL := all

BUILD ?= build
PREFIX ?= /usr/local
DESTDIR ?=
ifeq ($(origin CC),default)
CC := cc
endif
CFLAGS ?= -O2 -g
SANITIZE ?=
WERROR ?= -Werror
FUZZ_SECONDS ?= 60
CLANG ?= clang
PYTHON ?= $(firstword $(wildcard build/venv/bin/python) python3)

# `make V=1` shows the commands.
ifeq ($(V),)
Q := @
say = $(if $(findstring s,$(firstword -$(MAKEFLAGS))),,@printf '  %-5s %s\n' $1 $2)
endif

# ---- sources ------------------------------------------------------------------------------------------------------

arch := $(firstword $(subst -, ,$(shell $(CC) -dumpmachine)))
other_isa := $(if $(filter x86_64,$(arch)),,%_avx2.c %_avx512.c %_avx512vnni.c %_avx512bf16.c %_amx.c) $(if $(filter aarch64,$(arch)),,%_neon.c)
# The C files of a folder and of those below it, three deep.
c_below = $(wildcard $1/*.c $1/*/*.c $1/*/*/*.c)
# Of kernels/cuda only what needs no GPU: the plugin has the rest.
cuda_plans := $(wildcard kernels/cuda/heuristics*.c kernels/cuda/*/heuristics*.c) $(patsubst %,kernels/cuda/quant/%.c,group_rows groups panels)
every_source := $(foreach d,config kernels models engine server,$(call c_below,$(d)))
sources := $(filter-out $(other_isa) kernels/cuda/%,$(every_source)) $(cuda_plans)
lib_sources := $(filter-out server/main.c,$(sources))
unit_sources := $(filter tests/unit/%,$(foreach f,$(call c_below,tests/unit),$(if $(filter test_%,$(notdir $(f))),$(f))))
fuzz_sources := $(wildcard tests/fuzz/fuzz_*.c)
# A file of these folders that has a main is a program, the others are shared.
tool_candidates := $(wildcard tests/sim/*.c tests/bench/*.c tests/tools/*.c)
tool_sources := $(if $(tool_candidates),$(shell grep -lw '^int main' $(tool_candidates)))
shared_sources := $(filter-out $(tool_sources),$(tool_candidates))

lib_objects := $(lib_sources:%.c=$(BUILD)/obj/%.o)
main_object := $(patsubst %.c,$(BUILD)/obj/%.o,$(wildcard server/main.c))
shared_objects := $(shared_sources:%.c=$(BUILD)/obj/%.o)
objects := $(lib_objects) $(main_object) $(shared_objects) \
    $(patsubst %.c,$(BUILD)/obj/%.o,$(unit_sources) $(tool_sources) $(fuzz_sources))

lib := $(BUILD)/libquire.a
shared := $(if $(shared_objects),$(BUILD)/libshared.a)
quire := $(if $(main_object),$(BUILD)/quire)
units := $(unit_sources:tests/%.c=$(BUILD)/tests/%)
tools := $(tool_sources:tests/%.c=$(BUILD)/tests/%)
sim_tools := $(filter $(BUILD)/tests/sim/% $(BUILD)/tests/tools/%,$(tools))
bench_tools := $(filter $(BUILD)/tests/bench/%,$(tools))
fuzzers := $(fuzz_sources:tests/fuzz/%.c=$(BUILD)/tests/fuzz/%)

# ---- flags --------------------------------------------------------------------------------------------------------

packages := libmicrohttpd libcjson yaml-0.1 libxxhash libpcre2-8 libutf8proc ck libcurl gnutls
no_build := help clean format lint
ifneq ($(if $(MAKECMDGOALS),$(filter-out $(no_build),$(MAKECMDGOALS)),all),)
package_cflags := $(shell pkg-config --cflags $(packages) 2>/dev/null || echo missing)
ifeq ($(package_cflags),missing)
$(error libraries are missing (needed: $(packages)): run scripts/install-deps)
endif
package_libs := $(shell pkg-config --libs $(packages))
endif

baseline := $(if $(filter x86_64,$(arch)),-march=x86-64-v2)
warnings := -Wall -Wextra -Wstrict-prototypes -Wmissing-prototypes -Wvla $(WERROR)
hardening := -fstack-protector-strong $(if $(SANITIZE),,-D_FORTIFY_SOURCE=2)
compile := -std=c11 -D_GNU_SOURCE -I. $(warnings) $(baseline) -fno-math-errno $(hardening) $(package_cflags) $(SANITIZE) $(CFLAGS)
libs := $(package_libs) -ldl -lm -pthread
link := -pthread -Wl,-z,relro,-z,now $(SANITIZE) $(CFLAGS) $(LDFLAGS)

avx2 := -mavx2 -mfma -mf16c
avx512 := $(avx2) -mavx512f -mavx512bw -mavx512vl -mavx512dq
$(BUILD)/obj/%_avx2.o: extra := $(avx2)
$(BUILD)/obj/%_avx512.o: extra := $(avx512)
$(BUILD)/obj/%_avx512vnni.o: extra := $(avx512) -mavx512vnni
$(BUILD)/obj/%_vbmi_avx512vnni.o: extra := $(avx512) -mavx512vnni -mavx512vbmi
$(BUILD)/obj/%_gfni_avx512vnni.o: extra := $(avx512) -mavx512vnni -mgfni
$(BUILD)/obj/%_avx512bf16.o: extra := $(avx512) -mavx512bf16
$(BUILD)/obj/%_amx.o: extra := $(avx512) -mavx512vnni -mavx512bf16 -mamx-tile -mamx-bf16 -mamx-int8

# The inner loops work on arrays that their callers divide, and share nothing else. ThreadSanitizer in them would make
# a model's step so slow that tests of a server with a model tell nothing.
ifneq ($(findstring thread,$(SANITIZE)),)
$(BUILD)/obj/kernels/cpu/simd/%.o: inner_loops := -fno-sanitize=thread
endif

# Other flags mean other objects: the stamp changes when they do.
stamp := $(BUILD)/flags
flags_text := $(CC) $(compile) $(link)
ifneq ($(package_cflags),)
ifneq ($(flags_text),$(file <$(stamp)))
$(shell mkdir -p $(BUILD))
$(file >$(stamp),$(flags_text))
endif
endif

# ---- the daemon ---------------------------------------------------------------------------------------------------

.PHONY: all
all: $(lib) $(quire) ## build/quire and build/libquire.a (the default)

$(BUILD)/obj/%.o: %.c $(stamp)
	@mkdir -p $(@D)
	$(call say,CC,$<)
	$(Q)$(CC) $(compile) $(extra) $(inner_loops) -MMD -MP -c -o $@ $<

$(stamp): ;

# The page is put into the program (.incbin), which the compiler's list of dependencies does not tell.
$(BUILD)/obj/server/ui/ui.o: server/ui/index.html

# Made anew, so that a source that is gone leaves no object behind.
$(lib): $(lib_objects)
	@rm -f $@
	$(Q)$(AR) rcs $@ $^

$(BUILD)/libshared.a: $(shared_objects)
	@rm -f $@
	$(Q)$(AR) rcs $@ $^

$(BUILD)/quire: $(main_object) $(lib)
	$(call say,LINK,$@)
	$(Q)$(CC) $(link) -o $@ $^ $(libs)

# ---- tests --------------------------------------------------------------------------------------------------------

.PHONY: check unit units tools bench asan tsan sanitized valgrind
check: all units tools ## every test that this machine can run; scripts/check also installs what it needs
	scripts/run-tests --build $(BUILD)

unit: units ## the unit tests alone
	scripts/run-tests --build $(BUILD) unit

units: $(units)

tools: $(sim_tools)

# The scheduler's heart as tests/unit/engine/sched/test_step_work.c wants it: each basic block calls a counter. Linked before the library's.
counted := $(patsubst %.c,$(BUILD)/counted/%.o,\
    $(filter-out %_check.c %_snapshot.c,$(wildcard engine/sched/sched*.c)) \
    $(addprefix engine/sched/,kv/regions.c kv/kvpool.c kv/prefix.c kv/contiguous_alloc.c decode/pack.c decode/decode.c decode/commit.c))
$(BUILD)/counted/%.o: %.c $(stamp)
	@mkdir -p $(@D)
	$(call say,CC,$<)
	$(Q)$(CC) $(compile) -fsanitize-coverage=trace-pc -MMD -MP -c -o $@ $<
$(BUILD)/tests/unit/engine/sched/test_step_work: $(counted)
$(BUILD)/tests/unit/engine/sched/test_step_work: first := $(counted)

$(units) $(tools): $(BUILD)/tests/%: $(BUILD)/obj/tests/%.o $(shared) $(lib)
	@mkdir -p $(@D)
	$(call say,LINK,$@)
	$(Q)$(CC) $(link) -o $@ $(first) $(filter-out $(first),$^) $(libs) $(if $(filter $(units),$@),-lcmocka)

bench: all $(bench_tools) ## build the measuring programs of tests/bench into build/tests/bench
	@printf 'run one of:\n'; printf '  %s\n' $(bench_tools)

asan_flags := -fsanitize=address,undefined -fno-sanitize-recover=all -fno-omit-frame-pointer
tsan_flags := -fsanitize=thread -fno-omit-frame-pointer

# Without -Werror: gcc has a warning at -O1 for loops that it does not unroll as asked.
asan: ## the unit and HTTP tests under AddressSanitizer and UndefinedBehaviorSanitizer
	$(MAKE) BUILD=build/asan CFLAGS="-O1 -g" WERROR= SANITIZE="$(asan_flags)" sanitized

tsan: ## the unit and HTTP tests under ThreadSanitizer
	$(MAKE) BUILD=build/tsan CFLAGS="-O2 -g" SANITIZE="$(tsan_flags)" sanitized

sanitized: all units
	scripts/run-tests --build $(BUILD) unit http

# Random request combinations, and the largest request of every field, against $(quire). COMBINATIONS=N, SEED=N.
COMBINATIONS ?= 20000
.PHONY: combinations combinations-asan combinations-tsan
combinations: all ## COMBINATIONS (20,000) random requests alone and in company, and the largest of every field (SEED=N)
	QUIRE_BIN=$(abspath $(quire)) $(PYTHON) tests/http/combinations.py --runs $(COMBINATIONS) $(if $(SEED),--seed $(SEED))
	QUIRE_BIN=$(abspath $(quire)) $(PYTHON) -m pytest -q -p no:cacheprovider tests/http/test_resources.py

combinations-asan: ## the same under AddressSanitizer and UndefinedBehaviorSanitizer
	$(MAKE) BUILD=build/asan CFLAGS="-O1 -g" WERROR= SANITIZE="$(asan_flags)" combinations

combinations-tsan: ## the same under ThreadSanitizer
	$(MAKE) BUILD=build/tsan CFLAGS="-O2 -g" SANITIZE="$(tsan_flags)" combinations

valgrind: units ## the unit tests under valgrind (slow)
	QUIRE_TEST_WRAPPER="valgrind -q --error-exitcode=99 --leak-check=full" scripts/run-tests --build $(BUILD) unit

# ---- fuzzing: clang and its libFuzzer, everything instrumented for coverage ---------------------------------------

.PHONY: fuzz fuzz-plain fuzzers
fuzz: ## every parser's fuzz target for FUZZ_SECONDS (60) each, with the lines covered
	@command -v $(CLANG) >/dev/null || { echo "make fuzz needs clang: apt-get install clang llvm"; exit 1; }
	$(MAKE) BUILD=build/fuzz CC=$(CLANG) CFLAGS="-O2 -g" WERROR= \
	    SANITIZE="-fsanitize=fuzzer-no-link,address,undefined -fprofile-instr-generate -fcoverage-mapping" fuzzers
	scripts/fuzz --build build/fuzz --seconds $(FUZZ_SECONDS)

# Counters of coverage alone: comparisons are neither traced nor intercepted, which takes most of a small parser's time.
fuzz-plain: ## the same without sanitizers, several times as many inputs; on the same corpus
	$(MAKE) BUILD=build/fuzz-plain CC=$(CLANG) CFLAGS="-O2 -g" WERROR= \
	    SANITIZE="-fsanitize-coverage=inline-8bit-counters,pc-table" \
	    LIBFUZZER="-Wl,--whole-archive $$($(CLANG) --print-file-name=libclang_rt.fuzzer-$$(uname -m).a) -Wl,--no-whole-archive -lstdc++" fuzzers
	scripts/fuzz --build build/fuzz-plain --corpus build/fuzz/corpus --seconds $(FUZZ_SECONDS)

LIBFUZZER ?= -fsanitize=fuzzer
fuzzers: $(fuzzers)

$(fuzzers): $(BUILD)/tests/fuzz/%: $(BUILD)/obj/tests/fuzz/%.o $(lib)
	@mkdir -p $(@D)
	$(call say,LINK,$@)
	$(Q)$(CC) $(link) -o $@ $^ $(LIBFUZZER) $(libs)

$(BUILD)/obj/tests/fuzz/%.o: extra := -Wno-missing-prototypes

# ---- CUDA plugin --------------------------------------------------------------------------------------------------

CUDA_HOME ?= $(patsubst %/bin/nvcc,%,$(firstword $(realpath $(shell command -v nvcc)) $(wildcard /usr/local/cuda/bin/nvcc)))
nvcc := $(CUDA_HOME)/bin/nvcc
# Ampere, Ada, Hopper, and Blackwell where nvcc knows it (12.8); code of sm_100 runs on sm_103 too, of sm_120 on sm_121.
CUDA_ARCHS ?= sm_80 sm_86 sm_89 sm_90a $(filter sm_100 sm_120,$(shell $(nvcc) --list-gpu-code))
CUDA_PTX ?= compute_80 compute_90
# Compressed for size, the plugin takes a seventh.
NVCC_FLAGS ?= -O3 -lineinfo $(if $(findstring --compress-mode,$(shell $(nvcc) --help)),--compress-mode=size)
# The CUDA runtime; scripts/gpu-ranks has one of its own.
CUDART ?= -lcudart_static
cuda_dir := $(BUILD)/cuda
cuda_objects := $(patsubst %,$(cuda_dir)/%.o,$(wildcard kernels/cuda/*.cu kernels/cuda/*.c kernels/cuda/*/*.cu kernels/cuda/*/*.c))
# What the plugin uses of config/ and kernels/ it carries itself, hidden; the linker drops the rest.
cuda_host := $(patsubst %,$(cuda_dir)/%.o,$(wildcard config/base/*.c config/settings/*.c kernels/*.c kernels/comm/*.c))
gencode := $(foreach a,$(CUDA_ARCHS),-gencode arch=$(a:sm_%=compute_%),code=$(a)) \
    $(foreach a,$(CUDA_PTX),-gencode arch=$(a),code=$(a))
pic := -fPIC -fvisibility=hidden -ffunction-sections -fdata-sections

.PHONY: cuda
cuda: $(if $(CUDA_HOME),$(BUILD)/libquire_cuda.so,no-nvcc) ## build/libquire_cuda.so, the plugin for NVIDIA GPUs (CUDA_ARCHS="sm_90a" for one kind)

.PHONY: cuda-archs
cuda-archs: # scripts/gpu-archs asks for them
	@echo $(CUDA_ARCHS)

.PHONY: no-nvcc
no-nvcc:
	@echo "make cuda needs NVIDIA's nvcc (the CUDA toolkit, 12.0 or newer): not on PATH, not in /usr/local/cuda; or set CUDA_HOME"
	@exit 1

$(cuda_dir)/%.cu.o: %.cu $(cuda_dir)/flags
	@mkdir -p $(@D)
	$(call say,NVCC,$<)
	$(Q)$(nvcc) -std=c++17 $(NVCC_FLAGS) $(gencode) -I. -Xcompiler -fPIC,-fvisibility=hidden,-Wall,-g -Werror all-warnings \
	    -MMD -MP -MF $(@:.o=.d) -c -o $@ $<

$(cuda_dir)/%.c.o: %.c $(cuda_dir)/flags
	@mkdir -p $(@D)
	$(call say,CC,$<)
	$(Q)$(CC) $(compile) $(pic) -isystem $(CUDA_HOME)/include -MMD -MP -c -o $@ $<

$(cuda_dir)/libhost.a: $(cuda_host)
	@rm -f $@
	$(Q)$(AR) rcs $@ $^

# Visible is what a file marks so: quire_backend_open.
$(BUILD)/libquire_cuda.so: $(cuda_objects) $(cuda_dir)/libhost.a
	$(call say,LINK,$@)
	$(Q)$(CC) -shared $(link) -Wl,--gc-sections -Wl,--exclude-libs,ALL -o $@ $^ -L$(CUDA_HOME)/lib64 \
	    -Wl,--push-state,--as-needed -lcublasLt $(CUDA_LIBS) -Wl,--pop-state $(CUDART) -lstdc++ -lrt -ldl -lm -pthread

cuda_flags := $(CUDA_HOME) $(NVCC_FLAGS) $(gencode) $(pic)
ifneq ($(filter cuda $(BUILD)/libquire_cuda.so,$(MAKECMDGOALS)),)
ifneq ($(cuda_flags),$(file <$(cuda_dir)/flags))
$(shell mkdir -p $(cuda_dir))
$(file >$(cuda_dir)/flags,$(cuda_flags))
endif
endif
$(cuda_dir)/flags: ;

# ---- packages -----------------------------------------------------------------------------------------------------

.PHONY: man docs deb
man: $(BUILD)/quire.8 ## build/quire.8, the manual page

$(BUILD)/quire.8: deploy/quire.8.in deploy/make-man $(quire)
	$(Q)deploy/make-man $(quire) >$@

docs: all ## what is printed from the settings' table and from the records: docs/, config/quire.yaml, deploy/completion
	scripts/make-docs --build $(BUILD)

deb: all $(BUILD)/quire.8 ## Debian packages of the daemon and of the bundled model, into build/deb
	deploy/make-deb $(BUILD)

# ---- house-keeping ------------------------------------------------------------------------------------------------

.PHONY: format lint install clean help
format: ## clang-format every C and CUDA file in place
	scripts/check-format --fix

lint: ## include arrows, headers alone, the scheduler's purity, formatting, printed documents
	scripts/run-tests --build $(BUILD) lint

SYSCONFDIR ?= /etc
UNITDIR ?= $(PREFIX)/lib/systemd/system
share := $(DESTDIR)$(PREFIX)/share

# Settings that are there are kept; the unit names the prefix.
install: all $(BUILD)/quire.8 ## into $(DESTDIR)$(PREFIX): the daemon, the bundled model, the systemd unit; /etc/quire/quire.yaml where there is none
	install -D -m 755 $(BUILD)/quire $(DESTDIR)$(PREFIX)/bin/quire
	[ ! -e $(BUILD)/libquire_cuda.so ] || \
	    install -D -m 755 $(BUILD)/libquire_cuda.so $(DESTDIR)$(PREFIX)/lib/quire/libquire_cuda.so
	install -d $(share)/quire/models/demo
	$(if $(wildcard models/demo/*),install -m 644 $(wildcard models/demo/*) $(share)/quire/models/demo/)
	install -D -m 644 LICENSE $(share)/doc/quire/LICENSE
	[ ! -e README.md ] || install -m 644 README.md $(share)/doc/quire/README.md
	install -D -m 644 $(BUILD)/quire.8 $(share)/man/man8/quire.8
	install -D -m 644 deploy/completion/quire.bash $(share)/bash-completion/completions/quire
	install -D -m 644 deploy/completion/_quire $(share)/zsh/site-functions/_quire
	[ -e $(DESTDIR)$(SYSCONFDIR)/quire/quire.yaml ] || \
	    install -D -m 644 config/quire.yaml $(DESTDIR)$(SYSCONFDIR)/quire/quire.yaml
	install -d $(DESTDIR)$(UNITDIR)
	sed 's|@PREFIX@|$(PREFIX)|g' config/quire.service >$(DESTDIR)$(UNITDIR)/quire.service
	chmod 644 $(DESTDIR)$(UNITDIR)/quire.service

clean: ## remove what was built (build/venv stays)
	find $(BUILD) -mindepth 1 -maxdepth 1 ! -name venv -exec rm -rf {} +

help: ## this list
	@awk 'BEGIN {FS = ":.*## "} /^[a-z-]+:.*## / {printf "  make %-17s %s\n", $$1, $$2}' $(firstword $(MAKEFILE_LIST))
	@echo "  variables: BUILD=build PREFIX=/usr/local DESTDIR= CC=cc CFLAGS='-O2 -g' CUDA_ARCHS='sm_80 ...' FUZZ_SECONDS=60"

-include $(objects:.o=.d) $(counted:.o=.d) $(cuda_objects:.o=.d) $(cuda_host:.o=.d)
