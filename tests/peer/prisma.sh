#!/bin/bash
# prisma.sh ARGS: the real Prisma command line from this folder's node_modules, with the WASM schema engine behind it.
# Needs DATABASE_URL and what .ci/prepare installs.
cd "$(dirname "$0")" && exec env NO_COLOR=1 PRISMA_HIDE_UPDATE_MESSAGE=1 CHECKPOINT_DISABLE=1 \
    PRISMA_SCHEMA_ENGINE_BINARY="$PWD/schema-engine-shim.mjs" node node_modules/prisma/build/index.js "$@"
