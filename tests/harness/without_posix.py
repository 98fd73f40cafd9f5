"""Shows the package what Python has on Windows; a copy is the ``sitecustomize`` of processes.

The names that only POSIX systems have are missing for the package's own modules and scripts, not
for those of Python and of other packages: these have their own ways on Windows.  ``os.name``
stays, so the package's few lines for ``os.name == "nt"`` do not run.
"""

import builtins
import os
import select
import signal
import socket
import sys
import time
from types import ModuleType
from typing import Any

OURS = os.environ["PACKAGE_WITHOUT_POSIX"]  # the folder of the package
MODULES = {"fcntl", "grp", "posix", "pty", "pwd", "resource", "syslog", "termios", "tty"}
# of Python 3.11's posixmodule.c, what is there for Windows, and what os.py adds; and of others
OS = """
    abort access add_dll_directory altsep chdir chmod close closerange cpu_count curdir defpath
    device_encoding devnull dup dup2 environ environb error execl execle execlp execlpe execv
    execve execvp execvpe extsep fdopen fsdecode fsencode fspath fstat fsync ftruncate
    get_exec_path get_handle_inheritable get_inheritable get_terminal_size getcwd getcwdb getenv
    getlogin getpid getppid isatty kill linesep link listdir lseek lstat makedirs mkdir name open
    pardir path pathsep pipe popen putenv read readlink remove removedirs rename renames replace
    rmdir scandir sep set_handle_inheritable set_inheritable spawnl spawnle spawnv spawnve
    startfile stat stat_result statvfs_result strerror supports_bytes_environ supports_dir_fd
    supports_effective_ids supports_fd supports_follow_symlinks symlink system terminal_size times
    times_result truncate umask uname_result unlink unsetenv urandom utime waitpid
    waitstatus_to_exitcode walk write DirEntry PathLike F_OK R_OK W_OK X_OK
    O_APPEND O_CREAT O_EXCL O_RDONLY O_RDWR O_TRUNC O_WRONLY
    P_DETACH P_NOWAIT P_NOWAITO P_OVERLAY P_WAIT SEEK_CUR SEEK_END SEEK_SET TMP_MAX EX_OK
"""
SIGNAL = """
    Handlers ITIMER NSIG SIGABRT SIGBREAK SIGFPE SIGILL SIGINT SIGSEGV SIGTERM SIG_DFL SIG_IGN
    Signals default_int_handler getsignal raise_signal set_wakeup_fd signal strsignal valid_signals
"""
KEPT = {os: {*OS.split()}, signal: {*SIGNAL.split()}, select: {"select", "error"}}
GONE = {time: {"tzset", "clock_gettime", "clock_gettime_ns"}, socket: {"AF_UNIX"}}


def ours(depth: int) -> bool:
    """Return whether a module or a script of the package is at this depth of the stack."""
    return sys._getframe(depth + 1).f_code.co_filename.startswith(OURS)


class WindowsModule(ModuleType):
    """A module that lacks names for the package."""

    def __getattribute__(self, name: str) -> Any:
        value = super().__getattribute__(name)
        if name[0] == "_" or not ours(1):
            return value
        if (self in KEPT and name not in KEPT[self]) or name in GONE.get(self, ()):
            raise AttributeError(f"module {self.__name__} has no {name} on Windows")
        return value


def imported(name: str, *rest: Any, real: Any = builtins.__import__, **more: Any) -> Any:
    """Import a module that Windows has."""
    if name in MODULES and ours(1):
        raise ModuleNotFoundError(f"there is no module {name} on Windows", name=name)
    return real(name, *rest, **more)


for module in (*KEPT, *GONE):
    module.__class__ = WindowsModule
builtins.__import__ = imported
