/* Batteries of TestU01 on 32-bit little-endian words from standard input.
   usage: testu01 smallcrush|crush|rabbit|alphabit [reversed]
   reversed: the bits of each word in reverse order, since TestU01 looks mostly at the high ones.
   Rabbit and Alphabit take 2^30 bits. Exit: 0 no p-value outside [1e-10, 1 - 1e-10], 1 some, 2 usage, 3 input ended. */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <testu01/bbattery.h>
#include <testu01/swrite.h>
#include <testu01/unif01.h>

static uint32_t words[1 << 14];
static size_t next, filled;
static unsigned long long used;
static int reversed;

static unsigned int word(void) {
    if (next == filled) {
        filled = fread(words, sizeof words[0], sizeof words / sizeof words[0], stdin);
        next = 0;
        if (filled == 0) {
            fprintf(stderr, "testu01: the input ended after %llu words\n", used);
            exit(3);
        }
    }
    used++;
    uint32_t x = words[next++];
    if (reversed) {
        x = (x & 0x55555555) << 1 | (x >> 1 & 0x55555555);
        x = (x & 0x33333333) << 2 | (x >> 2 & 0x33333333);
        x = (x & 0x0F0F0F0F) << 4 | (x >> 4 & 0x0F0F0F0F);
        x = __builtin_bswap32(x);
    }
    return x;
}

int main(int argc, char **argv) {
    const char *battery = argc > 1 ? argv[1] : "";
    reversed = argc > 2 && strcmp(argv[2], "reversed") == 0;
    swrite_Basic = FALSE;
    unif01_Gen *generator = unif01_CreateExternGenBits("standard input", word);
    if (strcmp(battery, "smallcrush") == 0) {
        bbattery_SmallCrush(generator);
    } else if (strcmp(battery, "crush") == 0) {
        bbattery_Crush(generator);
    } else if (strcmp(battery, "rabbit") == 0) {
        bbattery_Rabbit(generator, 0x1p30);
    } else if (strcmp(battery, "alphabit") == 0) {
        bbattery_Alphabit(generator, 0x1p30, 0, 32);
    } else {
        fprintf(stderr, "usage: testu01 smallcrush|crush|rabbit|alphabit [reversed]\n");
        return 2;
    }
    int suspect = 0, fail = 0;
    for (int i = 0; i < bbattery_NTests; i++) {
        double p = bbattery_pVal[i];
        if (p < 0) {
            continue; /* not run */
        }
        if (p < 1e-10 || p > 1 - 1e-10) {
            fail++;
        } else if (p < 1e-3 || p > 1 - 1e-3) {
            suspect++;
        }
    }
    printf("RESULT statistics=%d suspect=%d fail=%d\n", bbattery_NTests, suspect, fail);
    unif01_DeleteExternGenBits(generator);
    return fail != 0;
}
