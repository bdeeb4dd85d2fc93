# Each target is one line; scripts/check, scripts/demo and scripts/interop set up what they need by themselves.
BIN ?= .venv/bin

.PHONY: setup fmt lint type test mutants check interop bench docs proto

setup:   ; scripts/setup dev engine otel plot tokenizers kv-events dns k8s migrate deploy
fmt:     ; $(BIN)/ruff format . && $(BIN)/ruff check --fix .
lint:    ; $(BIN)/ruff format --check . && $(BIN)/ruff check .
type:    ; $(BIN)/mypy
test:    ; $(BIN)/pytest
mutants: ; $(BIN)/python tests/mutants/run.py
check:   ; scripts/check
interop: ; scripts/interop
bench:   ; $(BIN)/python bench/compare.py && $(BIN)/python bench/growth.py
docs:    ; $(BIN)/pointsman config reference > docs/config.md && $(BIN)/pointsman admin reference > docs/admin.md
proto:   ; $(BIN)/python -m pointsman.proto
