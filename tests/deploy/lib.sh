# For the scripts beside it, which source it: what a deployment test needs of this machine, and a fresh system to test
# in. Nothing here reaches beyond $work, which goes away at the end.
# shellcheck shell=bash
set -euo pipefail

top=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
cache=${QUIRE_DEPLOY_CACHE:-$top/build/deploy}
mkdir -p "$cache"
work=$(mktemp -d "$cache/run-XXXXXX")

# Run at the end in reverse order, whatever happens.
cleanups=()
at_end() { cleanups+=("$*"); }
run_cleanups() {
    local status=$? i
    for ((i = ${#cleanups[@]} - 1; i >= 0; i--)); do eval "${cleanups[i]}" || true; done
    rm -rf --one-file-system "$work"
    exit $status
}
trap run_cleanups EXIT
trap 'exit 143' TERM INT

skip() { echo "$*"; exit 77; }
fail() { echo "FAILED: $*"; exit 1; }
step() { printf '%s %s\n' "$(date +%T)" "$*"; }

needs_root() { [ "$(id -u)" -eq 0 ] || skip "needs root"; }
needs() {
    local tool
    for tool in "$@"; do command -v "$tool" >/dev/null || skip "needs $tool (apt-get install $tool)"; done
}

# Where a suite comes from: QUIRE_DEPLOY_MIRROR, or for Debian the mirror this machine itself installs from.
mirror_of() { # suite
    [ -z "${QUIRE_DEPLOY_MIRROR:-}" ] || { echo "$QUIRE_DEPLOY_MIRROR"; return; }
    case $1 in
    bookworm | trixie)
        { awk '/^URIs:/ {print $2; exit}' /etc/apt/sources.list.d/debian.sources 2>/dev/null
          awk '$1 == "deb" && /debian/ && !/security/ {print $2; exit}' /etc/apt/sources.list 2>/dev/null || true; } | head -1 ;;
    esac
}

# A fresh minimal system, made once in the cache and copied to $1.
fresh_system() { # folder suite packages
    local folder=$1 suite=$2 packages=$3 mirror base script=() options=()
    base=$cache/$suite-$(sha256sum <<<"$packages" | cut -c1-12)
    if [ ! -e "$base/.complete" ]; then
        mirror=$(mirror_of "$suite")
        [ -n "$mirror" ] || skip "no mirror of $suite in this machine's apt sources; QUIRE_DEPLOY_MIRROR names one"
        case $suite in
        bookworm | trixie) ;;
        *) # Ubuntu: as its images come, with universe; one script of debootstrap serves all releases
            script=(/usr/share/debootstrap/scripts/gutsy)
            options=(--components=main,universe)
            [ -e /usr/share/keyrings/ubuntu-archive-keyring.gpg ] || options+=(--no-check-gpg) ;;
        esac
        rm -rf --one-file-system "$base"
        step "debootstrap $suite"
        debootstrap --variant=minbase --include="$packages" "${options[@]}" "$suite" "$base" "$mirror" "${script[@]}" \
            >"$work/debootstrap.log" 2>&1 ||
            { tail -20 "$work/debootstrap.log"; skip "debootstrap cannot make a system here"; }
        touch "$base/.complete"
    fi
    cp -a --reflink=auto "$base" "$folder"
    # The machine's ways to its package servers.
    cp /etc/resolv.conf "$folder/etc/resolv.conf"
    cp -r /etc/apt/apt.conf.d/. "$folder/etc/apt/apt.conf.d/"
    rm -f "$folder"/etc/apt/apt.conf.d/docker-*
    if [ -e /etc/pip.conf ]; then cp /etc/pip.conf "$folder/etc/pip.conf"; fi
    if [ -d /usr/local/share/ca-certificates ]; then
        cp -r /usr/local/share/ca-certificates/. "$folder/usr/local/share/ca-certificates/"
    fi
    if [ -e "$folder/etc/ssl/certs/ca-certificates.crt" ]; then
        cp /etc/ssl/certs/ca-certificates.crt "$folder/etc/ssl/certs/ca-certificates.crt"
    fi
}

# What git tracks, as it lies here, without the build.
copy_of_the_tree() { # folder
    mkdir -p "$1"
    git -c safe.directory='*' -C "$top" ls-files -z --cached --others --exclude-standard |
        (cd "$top" && xargs -0 ls -d 2>/dev/null | tar -cf - -T -) | tar -xf - -C "$1"
}

# A command inside, with its own mounts; they go away with it.
inside() { # folder command...
    local folder=$1
    shift
    # shellcheck disable=SC2016
    unshare --mount --propagation private -- env -i PATH=/usr/sbin:/usr/bin:/sbin:/bin HOME=/root LANG=C.UTF-8 \
        bash -c 'root=$1; shift
            mount -t proc proc "$root/proc"
            mount --rbind /dev "$root/dev"
            exec chroot "$root" "$@"' inside "$folder" "$@"
}

# Boots the system in folder $1 in a container with this machine's network; $container is then systemd-nspawn's guardian.
boot() { # folder
    mkdir -p "$1/var/log/journal" /run/systemd/nspawn/propagate
    timeout 1800 systemd-nspawn -q -D "$1" --boot --register=no --keep-unit --console=read-only </dev/null >"$work/boot.log" 2>&1 &
    container=$!
    at_end "kill $container 2>/dev/null; wait $container 2>/dev/null"
}
# Until the daemon in it answers.
wait_for_boot() { # port
    local booted=$SECONDS
    until wait_for_health "$1" 1; do
        kill -0 "$container" 2>/dev/null ||
            { tail -20 "$work/boot.log"; skip "systemd-nspawn cannot boot here: $(tail -1 "$work/boot.log")"; }
        [ $((SECONDS - booted)) -lt 900 ] || { tail -20 "$work/boot.log"; journal; fail "not ready"; }
    done
}
# The last the daemon said there.
journal() { journalctl -D "$work/root/var/log/journal" -u quire --no-pager -o cat 2>/dev/null | tail -40; }
# To systemd-nspawn, which passes it on as a request to power off. Not to timeout: it signals twice, and twice means kill.
power_off() {
    kill -TERM "$(pgrep -P "$container")"
    wait "$container" || true
}

free_port() { python3 -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])'; }

# Until http://127.0.0.1:$1/health says ready, at most $2 seconds.
wait_for_health() { # port seconds
    local until=$((SECONDS + $2))
    until curl -fs --max-time 30 "http://127.0.0.1:$1/health" >/dev/null 2>&1; do
        [ $SECONDS -lt $until ] || return 1
        sleep 0.2
    done
}

# A completion must bring text.
ask() { # port
    local answer
    answer=$(curl -sS --max-time 600 "http://127.0.0.1:$1/v1/completions" -H 'Content-Type: application/json' \
        -d '{"prompt": "Once upon a time", "max_tokens": 16, "temperature": 0}')
    grep -q '"text": *"[^"]' <<<"$answer" || { echo "$answer"; return 1; }
    step "answer: $(cut -c1-200 <<<"$answer")"
}
