"""Many devices: which slice lives where, what is exchanged when, and one device's numbers."""

from .communicator import Communicator as Communicator
from .communicator import SingleCommunicator as SingleCommunicator
from .communicator import part as part
from .mpi import MpiCommunicator as MpiCommunicator
