"""Runs what Triton's compiler makes of our kernels, PTX for Hopper and Blackwell, without a card.

- `ptx` reads the text, `translate` and `opcodes` turn each stretch of it without branches into a
  function of NumPy arrays, a register's values in all threads;
- `machine` runs these functions in the order that a `schedule.Schedule` chooses, with barriers;
- `global_memory` and `shared_memory` hold the values and check each access; `races` finds accesses
  that no barrier or atomic orders;
- `driver` stands for the card below Triton, so that launches go their whole way.
"""
