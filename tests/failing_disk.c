/* Makes a call below a folder fail in programs that preload this library with LD_PRELOAD.

FAULT_FOLDER   the folder
FAULT_CONTROL  a file that holds the struct below, which other processes read and write
FAULT_LOG      a file that gets a line `KIND PATH` per call, if set */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

enum { WRITE, FSYNC, RENAME, STAT, OPEN, MKDIR, UNLINK, KINDS };
static const char *names[] = {"write", "fsync", "rename", "stat", "open", "mkdir", "unlink"};

static struct {
    int64_t kind, number, error, period, counts[KINDS];
} *control;
static char folder[PATH_MAX];
static size_t length;
static int lines = -1;

__attribute__((constructor)) static void begin(void) {
    const char *place = getenv("FAULT_FOLDER"), *file = getenv("FAULT_CONTROL");
    if (!place || !file) return;
    int descriptor = syscall(SYS_openat, AT_FDCWD, file, O_RDWR);
    control = mmap(NULL, sizeof *control, PROT_READ | PROT_WRITE, MAP_SHARED, descriptor, 0);
    if (control == MAP_FAILED) abort();
    syscall(SYS_close, descriptor);
    length = snprintf(folder, sizeof folder, "%s/", place);
    if (getenv("FAULT_LOG"))
        lines = syscall(SYS_openat, AT_FDCWD, getenv("FAULT_LOG"), O_WRONLY | O_APPEND | O_CREAT, 0600);
}

/* The path of an open file, or of a name relative to an open folder. */
static const char *path_of(int at, const char *name, char *whole) {
    if (name && (name[0] == '/' || at == AT_FDCWD)) return name;
    char link[64];
    snprintf(link, sizeof link, "/proc/self/fd/%d", at);
    ssize_t size = syscall(SYS_readlinkat, AT_FDCWD, link, whole, PATH_MAX - 1);
    if (size < 0) size = 0;
    snprintf(whole + size, PATH_MAX - size, "%s%s", name ? "/" : "", name ? name : "");
    return whole;
}

/* Whether this call should fail. Sets errno if so. */
static int fails(int kind, int at, const char *name) {
    char whole[PATH_MAX];
    if (!control) return 0;
    int before = errno;
    const char *path = path_of(at, name, whole);
    if (strncmp(path, folder, length) != 0) { errno = before; return 0; }
    int64_t number = __atomic_add_fetch(&control->counts[kind], 1, __ATOMIC_SEQ_CST);
    if (lines >= 0) {
        char line[PATH_MAX + 16];
        int size = snprintf(line, sizeof line, "%s %s\n", names[kind], path + length);
        syscall(SYS_write, lines, line, size);
    }
    errno = before;
    if (kind != control->kind) return 0;
    int64_t later = number - control->number;
    if (later < 0 || (later && (!control->period || later % control->period))) return 0;
    errno = control->error;
    return 1;
}

#define NEXT(type, name) ((type)dlsym(RTLD_NEXT, name))
#define WRAP(kind, result, name, at, path, parameters, ...)                    \
    result name parameters {                                                   \
        if (fails(kind, at, path)) return -1;                                  \
        return NEXT(result(*) parameters, #name)(__VA_ARGS__);                 \
    }

WRAP(WRITE, ssize_t, write, f, NULL, (int f, const void *b, size_t n), f, b, n)
WRAP(WRITE, ssize_t, writev, f, NULL, (int f, const struct iovec *v, int n), f, v, n)
WRAP(FSYNC, int, fsync, f, NULL, (int f), f)
WRAP(FSYNC, int, fdatasync, f, NULL, (int f), f)
WRAP(RENAME, int, rename, AT_FDCWD, a, (const char *a, const char *b), a, b)
WRAP(RENAME, int, renameat, d, a, (int d, const char *a, int e, const char *b), d, a, e, b)
WRAP(STAT, int, stat, AT_FDCWD, p, (const char *p, struct stat *s), p, s)
WRAP(STAT, int, lstat, AT_FDCWD, p, (const char *p, struct stat *s), p, s)
WRAP(STAT, int, fstatat, d, p, (int d, const char *p, struct stat *s, int g), d, p, s, g)
WRAP(STAT, int, stat64, AT_FDCWD, p, (const char *p, struct stat64 *s), p, s)
WRAP(STAT, int, lstat64, AT_FDCWD, p, (const char *p, struct stat64 *s), p, s)
WRAP(STAT, int, fstatat64, d, p, (int d, const char *p, struct stat64 *s, int g), d, p, s, g)
WRAP(MKDIR, int, mkdir, AT_FDCWD, p, (const char *p, mode_t m), p, m)
WRAP(MKDIR, int, mkdirat, d, p, (int d, const char *p, mode_t m), d, p, m)
WRAP(UNLINK, int, unlink, AT_FDCWD, p, (const char *p), p)
WRAP(UNLINK, int, rmdir, AT_FDCWD, p, (const char *p), p)
WRAP(UNLINK, int, unlinkat, d, p, (int d, const char *p, int g), d, p, g)

#define OPENER(name, at, parameters, last, ...)                                \
    int name parameters {                                                      \
        va_list more;                                                          \
        va_start(more, last);                                                  \
        mode_t mode = last & (O_CREAT | O_TMPFILE) ? va_arg(more, mode_t) : 0; \
        va_end(more);                                                          \
        if (fails(OPEN, at, p)) return -1;                                     \
        return NEXT(int(*) parameters, #name)(__VA_ARGS__, mode);              \
    }

OPENER(open, AT_FDCWD, (const char *p, int g, ...), g, p, g)
OPENER(open64, AT_FDCWD, (const char *p, int g, ...), g, p, g)
OPENER(openat, d, (int d, const char *p, int g, ...), g, d, p, g)
OPENER(openat64, d, (int d, const char *p, int g, ...), g, d, p, g)
