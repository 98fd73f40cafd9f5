"""All checks in the ranks that MPI started; each is one start less of Python."""

from unsloth_cupy.parallel import MpiCommunicator

from . import collectives, layers, ring, training

if __name__ == "__main__":
    for checked in (False, True):
        collectives.all_checks(MpiCommunicator(timeout=60, checked=checked))
    for room in (layers, ring, training):
        room.all_checks(MpiCommunicator(timeout=60, checked=room is not training))
