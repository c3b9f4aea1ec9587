# bash completion for quire(8). Flags and their values are read from `quire COMMAND --help`, so they are always those of the
# program that is there.

# "--dtype auto|bfloat16" lines of a command: flag, blank, what stands for the value.
_quire_flags() {
    "$1" "$2" --help 2>/dev/null | sed -nE 's/^  (--[^ ]+)( ([^ ]+))?.*/\1 \3/p'
}

_quire() {
    local cur=${COMP_WORDS[COMP_CWORD]} prev=${COMP_WORDS[COMP_CWORD - 1]} quire=${COMP_WORDS[0]} command=${COMP_WORDS[1]} flags value
    COMPREPLY=()
    if [ "$COMP_CWORD" -eq 1 ]; then
        mapfile -t COMPREPLY < <(compgen -W "$("$quire" help 2>/dev/null | sed -nE 's/^  ([a-z]+) .*/\1/p')" -- "$cur")
        return
    fi
    case $command in
    bench) [ "$COMP_CWORD" -gt 2 ] || { mapfile -t COMPREPLY < <(compgen -W "offline serve --help" -- "$cur"); return; } ;;
    health) flags="--url URL" ;;
    esac
    flags+=$'\n'$(_quire_flags "$quire" "$command")
    # bench offline takes the settings too; health those of the server it asks.
    case $command in bench | health) flags+=$'\n'$(_quire_flags "$quire" serve) ;; esac

    value=$(awk -v flag="$prev" '$1 == flag {print $2; exit}' <<<"$flags")
    case $value in
    *\|*) mapfile -t COMPREPLY < <(compgen -W "${value//|/ }" -- "$cur") ;;
    DIR | FILE | PATH) compopt -o filenames; mapfile -t COMPREPLY < <(compgen -f -- "$cur") ;;
    [A-Z]*) ;;
    *)
        if [[ $cur == -* ]]; then
            flags=$(awk '{if (sub(/^--\[no-\]/, "--", $1)) print "--no-" substr($1, 3); print $1}' <<<"$flags")
            mapfile -t COMPREPLY < <(compgen -W "$flags --help" -- "$cur")
        elif [ "$command" = serve ]; then
            compopt -o filenames
            mapfile -t COMPREPLY < <(compgen -f -- "$cur")
        fi ;;
    esac
}
complete -F _quire quire
