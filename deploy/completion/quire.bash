# bash completion for quire(8). `make docs` prints the lists of flags from the program.

# ---- printed by make docs: begin ----
_quire_commands='serve
bench
simulate
quantize
models
config
health
version
help'
_quire_settings='--model DIR
--served-model-name NAME
--chat-format NAME
--[no-]generic-tools
--device auto|cpu|cuda
--dtype auto|bfloat16|float16|float32
--load-format auto|safetensors|gguf|dummy
--quantization none|fp8|int8|int8-g128|int8-asymmetric|int8-g128-asymmetric|int4|mxfp4
--quantization-smooth ALPHA
--quantization-text FILE
--generation-config auto|none
--max-model-len TOKENS
--max-num-seqs N
--max-num-batched-tokens TOKENS
--target-itl-ms MS
--preemption auto|swap|recompute
--policy fcfs|priority|fair
--[no-]deterministic
--speculate off|auto|suffix|grammar|draft|mtp
--draft-model DIR
--max-draft TOKENS
--speculative-config JSON
--seed N
--tensor-parallel-size N
--pipeline-parallel-size N
--[no-]expert-parallel
--threads N
--nnodes N
--node-rank N
--master-addr ADDRESS
--master-port PORT
--node-timeout SECONDS
--local-rank N
--local-size N
--kv-cache-dtype auto|bf16|float32|fp8|int8
--block-size TOKENS
--state-snapshot-tokens TOKENS
--kv-blocks N
--kv-cache-memory SIZE
--kv-policy paged|orca-max|orca-pow2|orca-oracle
--gpu-memory-utilization PART
--swap-space SIZE
--[no-]prefix-cache
--host ADDRESS
--port N
--uds PATH
--ssl-certfile FILE
--ssl-keyfile FILE
--api-key KEY
--api-key-file FILE
--prefix-cache-scope key|server
--max-queue N
--queue-timeout SECONDS
--request-timeout SECONDS
--max-connections N
--max-connections-per-address N
--trusted-proxies ADDRESSES
--header-timeout SECONDS
--body-timeout SECONDS
--admin-listen ADDRESS:PORT
--max-body-bytes SIZE
--client-buffer-bytes SIZE
--http-threads N
--shutdown-timeout SECONDS
--step-timeout SECONDS
--unknown-fields warn|reject
--max-logprobs N
--cors-origins ORIGINS
--[no-]ui
--metrics-prefix PREFIX
--log-format text|json
--log-level debug|info|warn|error
--access-log all|errors|none
--[no-]log-prompts
--config FILE'
_quire_bench='--requests
--input-len
--output-len
--workload
--script
--vocab
--bench-seed
--temperature
--top-p
--top-k
--n
--beam-width
--stop-at-eos
--url
--api-key
--served-model
--concurrency
--request-rate
--acceptance
--schemas
--warmup
--settle
--json
--name'
_quire_simulate='--rate
--requests
--seed
--dataset
--trace
--n
--beam
--shared-prefix
--manager
--preemption
--prefix-cache
--kv-slots
--kv-cache-dtype
--block-size
--host-blocks
--max-num-seqs
--max-num-batched-tokens
--max-model-len
--replicas
--routing
--target-latency
--target-ttft
--target-percentile
--cost-from
--overhead-us
--request-us
--seq-us
--weights-us
--token-us
--context-us
--swap-block-us
--json'
# ---- printed by make docs: end ----

# A command's flags, one a line: "--dtype auto|bfloat16" or "--port N".
_quire_flags() {
    case $1 in
    serve | config) printf '%s\n' "$_quire_settings" ;;
    bench) printf '%s\n' "$_quire_bench" "$_quire_settings" ;;
    health) printf '%s\n' '--url URL' "$_quire_settings" ;;
    simulate) printf '%s\n' "$_quire_simulate" ;;
    esac
}

_quire() {
    local cur=${COMP_WORDS[COMP_CWORD]} prev=${COMP_WORDS[COMP_CWORD - 1]}
    local command=${COMP_WORDS[1]} flags value

    COMPREPLY=()
    if [ "$COMP_CWORD" -eq 1 ]; then
        mapfile -t COMPREPLY < <(compgen -W "$_quire_commands" -- "$cur")
        return
    fi
    if [ "$command" = bench ] && [ "$COMP_CWORD" -eq 2 ]; then
        mapfile -t COMPREPLY < <(compgen -W "offline serve kernels --help" -- "$cur")
        return
    fi
    flags=$(_quire_flags "$command")
    value=$(awk -v flag="$prev" '$1 == flag {print $2; exit}' <<<"$flags")
    case $value in
    *\|*) mapfile -t COMPREPLY < <(compgen -W "${value//|/ }" -- "$cur") ;;
    DIR | FILE | PATH) compopt -o filenames; mapfile -t COMPREPLY < <(compgen -f -- "$cur") ;;
    [A-Z]*) ;;
    *)
        if [[ $cur == -* ]]; then
            flags=$(awk '{if (sub(/^--\[no-\]/, "--", $1)) print "--no-" substr($1, 3); print $1}' \
                <<<"$flags")
            mapfile -t COMPREPLY < <(compgen -W "$flags --help" -- "$cur")
        elif [ "$command" = serve ]; then
            compopt -o filenames
            mapfile -t COMPREPLY < <(compgen -f -- "$cur")
        fi ;;
    esac
}
complete -F _quire quire
