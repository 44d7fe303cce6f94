#!/bin/sh
# Chooses TGI's router and the sizes, then becomes TGI's launcher. Arguments are the launcher's.
#
# TGI_ROUTER   v3 (default) or v2
# TGI_HOME     where the launcher and the routers are
set -eu

home=${TGI_HOME:-/opt/tgi}
router=${TGI_ROUTER:-v3}
case $router in
v2 | v3) ;;
*)
    echo "error: TGI_ROUTER must be v2 or v3, not $router" >&2
    exit 2
    ;;
esac

# Sizes belong together: whoever gives one, as an option or as a variable, decides about all.
given=${MAX_BATCH_SIZE-}${MAX_TOTAL_TOKENS-}${MAX_INPUT_TOKENS-}${MAX_INPUT_LENGTH-}${MAX_BATCH_PREFILL_TOKENS-}
for argument; do
    case $argument in
    --max-batch-size* | --max-total-tokens* | --max-input-* | --max-batch-prefill-tokens*) given=yes ;;
    esac
done
if [ -z "$given" ]; then
    # 16 slots of 4096 tokens: a cache of 8.6 GB for a model with the shape of Llama-3-8B
    export MAX_BATCH_SIZE=16 MAX_TOTAL_TOKENS=4096 MAX_INPUT_TOKENS=3072 MAX_BATCH_PREFILL_TOKENS=4096
fi

PATH=$home/$router:$home:$PATH
export PATH
exec text-generation-launcher "$@"
