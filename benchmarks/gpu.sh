#!/usr/bin/env bash
# benchmarks/gpu.sh speed | exact | saves | sizes
#
# One part of the table of figures, on a machine with a GPU that has torch and transformers, and neither Ray nor
# network. Each part takes at most 8 minutes. The last line of each program is one JSON object; all output is also
# in $OUT (default: gpu-out). SMOKE=1 runs the same on tiny models, on a CPU too.
#
# What else the package imports comes as wheels in the folder $WHEELS (default: wheels, may be missing):
# annotated-types awkward awkward-cpp blake3 gigatoken orjson pydantic pydantic-core tenacity typer
# typing-extensions typing-inspection xxhash zlib-ng zstandard, and liger-kernel for the comparison.
set -u
cd "$(dirname "$0")/.."
part=${1:?speed, exact, saves or sizes}
OUT=${OUT:-gpu-out}
WHEELS=${WHEELS:-wheels}
PYTHON=${PYTHON:-python3}
mkdir -p "$OUT"
export TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1 PYTHONUNBUFFERED=1
if ls "$WHEELS"/*.whl >/dev/null 2>&1; then
	"$PYTHON" -m pip install -q --no-index --no-deps --no-compile --upgrade --target "$OUT/site" "$WHEELS"/*.whl
	export PYTHONPATH="$PWD/$OUT/site${PYTHONPATH:+:$PYTHONPATH}"
fi
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader 2>/dev/null || echo "no GPU is here"

run() { # seconds, name of the output, program and arguments
	local limit=$1 name=$2
	shift 2
	timeout -k 10 "$limit" "$PYTHON" -m "$@" --json 2>"$OUT/$name.log" | tee "$OUT/$name.json"
	tail -5 "$OUT/$name.log"
}

large=1b small=mini
[ -n "${SMOKE:-}" ] && large=tiny small=tiny
case $part in
speed) run 470 speed benchmarks.step --size $large --only speed --turns 2 --steps 4 ;;
exact) run 470 exact benchmarks.exact --size $small ;;
saves) run 470 saves benchmarks.step --size $large --only documents,saves,resume --turns 2 --steps 4 ;;
sizes)
	if [ -n "${SMOKE:-}" ]; then run 470 sizes-tiny benchmarks.step --size tiny --only speed --turns 1; exit; fi
	run 230 sizes-375m benchmarks.step --size 375m --only speed --turns 1 --steps 4
	run 240 sizes-1b-8k benchmarks.step --size 1b-8k --only speed --turns 1 --steps 3
	;;
*)
	echo "there are the parts speed, exact, saves and sizes, not $part" >&2
	exit 2
	;;
esac
