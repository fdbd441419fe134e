"""Checkpoint directories, without torch: what is in them, whether it is whole, and which ones are kept.

    checkpoints/latest                names the checkpoint that a resume reads
    checkpoints/step-000010/          leeway.json (TrainState, with size and CRC-32 of every file), deepspeed/
    checkpoints/model-files/          configuration and tokenizer of the model, as they came
    checkpoints/.step-000010.tmp/     a checkpoint being written
    checkpoints/.step-000010.old/     a checkpoint being deleted

state.py       names, leeway.json
damage.py      is it whole
find.py        which one a resume reads
retention.py   which ones are kept
disk.py        atomic writing
"""
