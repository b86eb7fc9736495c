#!/usr/bin/env bash
# Trains on a Cloud TPU pod: creates it, sends a wheel, runs on every worker, streams worker 0, starts again after a preemption,
# and deletes the pod.
#
# usage: tools/launch_tpu.sh --name=xcm --zone=us-central2-b --type=v4-32 --version=tpu-ubuntu2204-base -- \
#       --config=xcm:/data/XCM --config.workdir=/mnt/runs/xcm
#
#   --name=NAME          of the TPU VM and of its queued resource
#   --zone=ZONE          --type=TYPE     --version=IMAGE    as gcloud takes them. TYPE is also a target of
#                        `jaxtrain plan`: tpu:v5e:2x4, tpu:v4-32 or tpu:v5e-8
#   --check              runs no config, but python -m tools.tpu_check on every worker: what of the plan holds there. Its
#                        arguments follow after --, which may be left out. Its numbers are copied to tpu_check.json here
#   --project=PROJECT    (default: gcloud's own)
#   --queued             waits in the queue for resources, instead of failing while there are none
#   --spot               may be preempted; implies --queued
#   --wheel=FILE         of `make wheel` (default: the newest in dist/ of this checkout for x86-64)
#   --files=FOLDER       sent along: configs and modules of your own. The run begins in it
#   --retries=N          pods that may follow one that was preempted (20)
#   --setup=COMMAND      runs on every worker before the run, for example to mount the data and the workdir, which all share
#   --keep               leaves the pod there at the end
#   --dry-run            prints the commands, runs none
#
# Without --check, everything after -- goes to python -m jaxtrain.main --supervise, which restarts a process after a fault. Every worker is a
# process of one run, which finds the others by the metadata of its VM, and knows them by a secret that is made here for each
# pod. A run that is notified of a preemption saves and exits with 75; any other exit code ends this script, too.
set -euo pipefail

usage() { sed -n '2,/^set -/{/^set -/d;s/^# \{0,1\}//;p;}' "$0"; }
fail() { printf 'launch_tpu: %s\n' "$1" >&2; exit "${2:-2}"; }

name="" zone="" type="" version="" project="" queued=false spot=false retries=20 wheel="" files="" setup=true keep=false dry=false
check=false
while (($#)); do
    case $1 in
        --name=* | --zone=* | --type=* | --version=* | --project=* | --wheel=* | --files=* | --retries=* | --setup=*)
            option=${1%%=*}
            printf -v "${option#--}" %s "${1#*=}"
            ;;
        --queued) queued=true ;;
        --spot) spot=true queued=true ;;
        --keep) keep=true ;;
        --check) check=true ;;
        --dry-run) dry=true ;;
        --help) usage; exit 0 ;;
        --) shift; break ;;
        *) fail "argument $1 is unknown; the run's own follow after --. See --help" ;;
    esac
    shift
done
for needed in name zone type version; do
    [[ -n ${!needed} ]] || fail "--$needed= is missing; see --help"
done
for needed in zone type version project; do
    [[ ! ${!needed} =~ [[:cntrl:]] ]] || fail "--$needed= has a line break or another control character"
done
[[ $name =~ ^[a-z][a-z0-9-]*$ ]] || fail "--name=$name: small letters, digits and hyphens, a letter first"
[[ $retries =~ ^[0-9]+$ ]] || fail "--retries=$retries is no number"
(($#)) || $check || fail "no config; end with: -- --config=xcm"
[[ -z $files || -d $files ]] || fail "--files=$files is no folder"

root=$(cd "$(dirname "$0")/.." && pwd)
# Prints gcloud's name of a version if the plan has such slices, or types, of it: slices|types VERSION SIDES|NUMBER.
sold() {
    local kind version name values
    while read -r kind version name values; do
        [[ $kind == "$1" && $version == "$2" && " $values " == *" $3 "* ]] || continue
        printf %s "$name"
        return
    done <"$root/tools/tpu_slices.txt"
    return 1
}
# Refuses a number that no slice of a known version has: VERSION NUMBER. gcloud may have other versions.
require_number() {
    local kind version numbers n below="" above=""
    while read -r kind version numbers; do
        [[ $kind == counts && $version == "$1" ]] || continue
        for n in $numbers; do
            [[ $n != "$2" ]] || return 0
            # nine digits are enough, and more would not fit a number of the shell
            if ((n < 10#${2::9})); then below=$1-$n; else above=$1-$n; break; fi
        done
        fail "--type=$type is no slice; the nearest: $below${below:+${above:+ and }}$above"
    done <"$root/tools/tpu_slices.txt"
}
spec=("--accelerator-type=$type")
target=$(printf %s "$type" | tr '[:upper:]' '[:lower:]')  # as the plan reads it
no_slice="--type=$type is no slice; expected one of \`jaxtrain plan\`, for example tpu:v5e:2x4 or tpu:v4-32"
if [[ $target =~ ^tpu:([a-z0-9]+):([0-9x]+)$ ]]; then
    version_of_chip=${BASH_REMATCH[1]} topology=${BASH_REMATCH[2]}
    sold=$(sold slices "$version_of_chip" "$topology") || fail "$no_slice"
    spec=("--type=$sold" "--topology=$topology")
elif [[ $target =~ ^(tpu:)?([a-z0-9]+)-([0-9]+)$ ]] && sold=$(sold types "${BASH_REMATCH[2]}" "${BASH_REMATCH[3]}"); then
    spec=("--accelerator-type=$sold-${target##*-}")
elif [[ $target == tpu:* ]]; then
    fail "$no_slice"
elif [[ $target =~ ^([a-z0-9]+)-([0-9]+)$ ]]; then
    require_number "${BASH_REMATCH[1]}" "${BASH_REMATCH[2]}"
    spec=("--accelerator-type=$target")
fi
program=(jaxtrain.main --supervise)
if $check; then
    program=(tools.tpu_check)
    [[ " $*" != *" --out"* ]] || fail "--out is --check's own: the numbers are copied to tpu_check.json here"
    set -- "$@" --out=tpu_check.json
fi
if [[ -z $wheel ]]; then
    for built in "$root"/dist/jaxtrain-*-abi3-manylinux*_x86_64.whl; do
        [[ ! -f $built || -n $wheel && $wheel -nt $built ]] || wheel=$built
    done
    if $dry; then wheel=${wheel:-$root/dist/jaxtrain.whl}; fi  # whose commands need no wheel yet
    [[ -n $wheel ]] || fail "dist/ has no wheel for x86-64; \`make wheel\` makes one, or name one with --wheel=FILE"
fi
[[ -f $wheel && $wheel == *.whl ]] || $dry || fail "--wheel=$wheel is no wheel; \`make wheel\` makes one in dist/"
where=("--zone=$zone")
[[ -z $project ]] || where+=("--project=$project")
work=$(mktemp -d)
pause=${LAUNCH_TPU_PAUSE:-20}  # [s] between two looks at a queue or at a pod

# Runs a command, or prints it so that a shell would read it again.
run() {
    if $dry; then
        printf '%q ' "$@"
        printf '\n'
    else
        "$@"
    fi
}
tpu() { run gcloud compute tpus tpu-vm "$@" "${where[@]}"; }
queue() { run gcloud compute tpus queued-resources "$@" "${where[@]}"; }
on_all() { tpu ssh "$name" --worker=all --command="$1"; }

create() {
    if $queued; then
        local more=()
        ! $spot || more=(--spot)
        queue create "$name" --node-id="$name" "${spec[@]}" "${more[@]}" --runtime-version="$version"
        wait_in_queue
    else
        tpu create "$name" "${spec[@]}" --version="$version"
    fi
}

wait_in_queue() {
    local state
    while ! $dry; do
        state=$(queue describe "$name" --format='value(state.state)')
        case $state in
            ACTIVE) return ;;
            FAILED | SUSPENDED | SUSPENDING | DELETING) fail "the queued resource $name is $state" 1 ;;
        esac
        printf 'launch_tpu: %s waits for its resources (%s)\n' "$name" "$state" >&2
        sleep "$pause"
    done
    queue describe "$name" --format='value(state.state)'
}

delete() {
    if $queued; then
        queue delete "$name" --force --quiet
    else
        tpu delete "$name" --quiet
    fi
}

install() {
    mkdir -p "$work/send"
    [[ -z $files ]] || run cp -R "$files"/. "$work/send"
    ! $check || run cp -R "$root/tools" "$root/configs" "$work/send"
    run cp "$wheel" "$work/send"
    run tar -C "$work/send" -czf "$work/jaxtrain.tar.gz" .
    # In a file: arguments of a command are seen by everybody on the machine.
    (umask 077; head -c 32 /dev/urandom | od -An -v -tx1 | tr -d ' \n' >"$work/jaxtrain-secret")
    tpu scp "$work/jaxtrain.tar.gz" "$work/jaxtrain-secret" "$name:" --worker=all
    # Where the image's Python is too old, uv, a PyPI package, fetches another.
    # shellcheck disable=SC2016  # the workers expand it
    on_all 'set -e; chmod 600 jaxtrain-secret; mkdir -p jaxtrain; tar -C jaxtrain -xzf jaxtrain.tar.gz; cd jaxtrain; python=
for p in python3.13 python3.12 python3.11 python3; do
    [ -n "$python" ] || ! "$p" -c "import sys; sys.exit(sys.version_info < (3, 11))" 2>/dev/null || python=$p
done
if [ -n "$python" ]; then "$python" -m venv .venv
else python3 -m venv .uv; .uv/bin/pip install -q uv; .uv/bin/uv venv -q --seed --python 3.12 .venv; fi
.venv/bin/pip install -q "./'"$(basename "$wheel")"'[tpu]"'
}

# Runs on all workers, in the background: a lost connection is not the end of a run. Each leaves its exit code in a file.
train() {
    local arguments
    arguments=$(printf '%q ' "${program[@]}" "$@")
    on_all "set -e; cd jaxtrain; rm -f exit-code worker.log; JAXTRAIN_SECRET=\$(cat ../jaxtrain-secret); export JAXTRAIN_SECRET
$setup
(code=0; nohup .venv/bin/python -m $arguments >worker.log 2>&1 || code=\$?; echo \$code >exit-code) \\
    </dev/null >/dev/null 2>&1 &"
}

# Streams worker 0's log until its run has ended, through lost connections. Sets `code` to how it ended, "" when the pod went.
follow() {
    local first=1
    code=""
    while true; do
        # shellcheck disable=SC2016  # worker 0 expands it
        tpu ssh "$name" --worker=0 --command="cd jaxtrain; touch worker.log; tail -n +$first -F worker.log & "'log=$!
until test -s exit-code; do sleep 1; done; sleep 1; kill $log' | tee -a "$work/log" || true
        ! $dry || return 0
        code=$(tpu ssh "$name" --worker=0 --command='cat jaxtrain/exit-code' 2>/dev/null) || code=""
        [[ ! $code =~ ^[0-9]+$ ]] || return 0
        code=""
        ! gone || return 0
        first=$(($(wc -l <"$work/log") + 1))
        printf 'launch_tpu: the connection to %s was lost; trying again\n' "$name" >&2
        sleep "$pause"
    done
}

# Copies the check's numbers before the pod and its disk are deleted.
fetch() {
    tpu scp "$name:jaxtrain/tpu_check.json" . --worker=0 ||
        printf 'launch_tpu: the check left no tpu_check.json\n' >&2
}

# Whether the pod is gone: a lost connection alone does not mean so.
gone() {
    local state
    state=$(tpu describe "$name" --format='value(state)' 2>/dev/null) || state=""
    [[ $state != READY ]]
}

cleanup() {
    local code=$?
    rm -rf "$work"
    if $created && ! $keep; then
        delete || printf 'launch_tpu: %s could not be deleted; it costs money until it is\n' "$name" >&2
    fi
    exit "$code"
}
created=false
trap cleanup EXIT
trap 'exit 130' INT TERM

for ((attempt = 0; ; attempt++)); do
    created=true  # even a creation that fails can leave something
    create
    install
    train "$@"
    follow
    ! $check || fetch
    if $dry || [[ $code == 0 ]]; then
        exit 0
    fi
    if $check && [[ $code == [13] ]]; then
        fail "the check ended with code $code, 1 if a check failed, 3 if some were left; its numbers: tpu_check.json" "$code"
    fi
    if [[ -n $code && $code != 75 ]]; then
        fail "the run ended with code $code; its log is jaxtrain/worker.log on the workers" "$code"
    fi
    if ((attempt >= retries)); then
        fail "preempted, and $retries retries are used up" 75
    fi
    printf 'launch_tpu: %s was preempted; pod %s of %s\n' "$name" "$((attempt + 2))" "$((retries + 1))" >&2
    delete || true
done
