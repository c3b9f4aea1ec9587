/* Recorded runs for `quire simulate`, made by scripts/make-simulation-record:
 * SmolLM2-135M-Instruct on self-instruct's seed tasks.
 *
 * A search has one word a step: for each live beam, best first, the rank of its parent,
 * a for the best (simulate_beams.c). Lengths are in tokens, sorted: prompts with their
 * chat template, and the answers to them. 26 answers had not ended at 512 tokens,
 * where recording stopped; their lengths are an exponential tail with the rate at which
 * answers ended, truncated at 1024. */
#include "engine/simulate/simulate_impl.h"

/* clang-format off */

const struct sim_beam_record sim_beam_records[] = {
    {2,
     "aa ab ab aa aa "
    },
    {2,
     "aa ba ab ab ab ba ab ab ab ab ab aa ab ab ba aa "
    },
    {2,
     "aa ab ab ab ab ab aa aa ab ab aa ab ab aa ab ab bb aa ab aa aa ab "
    },
    {2,
     "aa aa ab ab aa aa aa aa ab ab ab aa ab ba ab ab ab aa aa ab ab ab ab ba "
    },
    {2,
     "aa aa aa ab aa ba ab ab ab ab ab ab ab ab ab ab ab ab ab aa ba ab aa ab aa ba ab ab ab ab "
     "ab ab ab ab aa aa ab "
    },
    {2,
     "aa ab ab aa ab ab ab ab aa ab aa ab ba ab ab ab ab ab ab ab ab ab aa ab ab ab ab ab aa ab "
     "ab ab aa ab ab ab ab ab ab ba ab ab "
    },
    {2,
     "aa ab ab ab aa ab aa aa ab ab ab ab ab aa aa aa ab ab aa ab ab aa ab aa ab aa ab ab aa aa "
     "ab ab ab ab ab ab aa ab ab aa ab aa ab ab ab aa aa "
    },
    {2,
     "aa aa ab ab ab ba ab ab ab aa ab aa aa ab ab ab ab aa ab ba ba ab ab aa ba aa ab ab ab ab "
     "ab aa ab ab ab aa ab aa aa ab ab ab ab ba ba ab ab ab ba aa aa aa "
    },
    {2,
     "aa ab aa ab aa ab aa ab aa ab ab aa ab ab ab ab ab ab aa ab aa ab ab ab ba ab ba ab ab aa "
     "aa ab ab aa aa ba ab ab ab aa ab ab aa ab aa ab aa ab bb ab aa ba ab ba aa ba ab ab ab ab "
     "aa "
    },
    {2,
     "aa aa ab ab ab ab ab aa ab ab aa aa ab aa aa aa ab aa ba ab ab aa ba ab ab aa ab ab aa aa "
     "ab ab ab ab ab ab ab ab ab ab ab ab ab ab ab ab ab ab ba ba ba aa ba aa bb ba aa aa ab aa "
     "ab aa ba ab aa ab aa "
    },
    {2,
     "aa ab aa ba ab ab aa ab ab ab aa ab ab ab ab ab ab aa aa aa ab ba aa ab ab ab ab aa ab aa "
     "ba ab aa ab aa aa ab ab ab ab aa ab ab aa ab ab ab ab ab aa ab ab ab ab ab ab ab ab ab ab "
     "aa ab ab ab ab ab ba ab ab ab ab aa ab ab ab ab ab aa aa aa aa ab ab aa ab aa ab "
    },
    {2,
     "aa aa ba ba ab ab ab ab ba aa ba ab ab bb aa ab ab aa ab ab aa bb ab ab bb ba ba ba ab aa "
     "aa ab ab bb ab aa ab ab aa ab ba ba ab ab ab ab aa ab ab ab ab ab ab ab ab ab ab ab ab ab "
     "ab ab ab ab ab ab ab ab ab ab ab ab ab ab ab ab ab ab ab ab ab ab ab ab ab ab ab ab ab ab "
     "ab ab ab ab ab ab "
    },
    {2,
     "aa aa aa aa ab ab ba ab ab ab ba aa ab ab ab aa ba aa ab ab ab ab ab aa ab ba ab ab ba aa "
     "bb ab aa ab ba ba ab ab ba bb aa ab ba ab aa ab ab aa aa ab ab aa ab ab ba aa ab ab ba ab "
     "aa ab aa ba ab aa aa ba ba aa aa ba ba ba ab aa aa aa ab ab ba aa aa aa ba ba aa ab ba ba "
     "ba ab ab ab aa ab ab ab ba ab ab aa aa aa ab aa ba aa ab ab aa ab ab ab ab ab aa ab ab aa "
     "ba ba ba ab aa ba aa bb ab aa ba ab aa aa ab ab aa aa aa ab ab ab ba ab aa ab ab aa ba ab "
     "aa ab ab aa ab ab ba ab ab ab ab ab ab ab ab ba ba ba aa aa ba ab ba ba aa aa ab ab ab aa "
     "aa ab ab ab ab aa aa aa bb ab aa "
    },
    {2,
     "aa ab bb ab ab ab ab ab ab ab ab ab ab aa ab ab ab aa ab aa ab ba aa ba aa aa ab ba aa ab "
     "aa ab ba ab ab ab ab ab ba ab aa aa aa ab ab aa aa ab ab ab aa ab ab ba ab ba aa ab aa ab "
     "ab ab ab ba ab ab aa bb ab aa ba ba ab aa ab ab ab ab ab aa ab ab ab ab ab ab ab ba ba ba "
     "ab ba ab ba aa ba ab ba aa ab ab aa ab ab ab ab aa ab ab aa ab aa ab ab ab ab ab ab ab ba "
     "ab ab ab ab ab ab ab ab ab ab ab ab ab ab ab ab ab ab aa ab ab ab ab ba ab ab ab ab ab ab "
     "aa ab ba ab ab ab ab ab ab aa ab ab ab ab ab ab ab ab ab ab ab ab ab ab ab ab ab ab aa ba "
     "ab ab ab ba ab ab ab ab ab ab ab "
    },
    {2,
     "aa ab aa aa ba ba ab aa ab ab ab ab ba ba ab ab aa ab ab ab ab ab ab ab ab ba ba aa ab ab "
     "ab ab ab ab ab ab ab ba ab aa ba aa ab ab ab ab ab ab ab ab aa aa aa ba ba ab ab ab ab ab "
     "ab ba aa aa aa ab ba ab ab ab ab ab ab ba ab aa aa ab aa aa ab ab ab ab ab ab ab aa aa ab "
     "aa aa ab ab ab ab ab ab ab ab ba ba ba ab ba ab ab ab ab ab ab ab ba ab ab ab ab ab ab ab "
     "ba ab ab ab ab ab ba ab ab ab ab ab ab ba ab ab ab ab ab ab ab ba ab ab ab ab ba ab ab ab "
     "ab ab ab ab ba ba ba ab ab ba ab ab ab ab ab ab ab ab ab ab ab ab ab ab ab ab ab ab ab ab "
     "ab ab ab ab ab ab ab ab ab ab ab "
    },
    {2,
     "aa ba ab ab ab ba ab ab ab aa aa ab ab aa aa ab ba aa ab ba aa ab ab bb ab ab bb ab aa ab "
     "ab ab aa ab aa ba ab bb aa ba ab ba ab ba ab aa ab ab ab ab aa ab aa ab ab ab ab ab aa ab "
     "ab aa ab aa ab ab ab ab aa ab ab ab ab ab ab aa ab ab aa ab ab ab ab ab ab ab ab ab ab ab "
     "ab ab ab ab ab ab aa ba ba ba ba ab ba ba ab ab ab ab ab ab ab ab ab ab ab ab ab ab ab ab "
     "ab ab ab ab ab ab ab ab ab ab ab ab ab ab ab ab ab ab ab ab ab ab ab ab ab ab ab ab ab ab "
     "ab ab ab ab ab ab ab ab ab ab ab ab ab ab ab ab ab ab ab ab ab ab ab ab ab ab ab ab ab ab "
     "ab ab ab ab ab ab ab ab ab ab ab "
    },
    {2,
     "aa ab ab ba ab ab ab ab ab aa ba ab ab ab ab ab ab ab ab ab ab ab ab ab ab ab ab ab ab ba "
     "aa ab ab ba ab ba ab ab ab ab ab ab ab ba ab ab ab aa aa aa aa ab ab ab ab ba ab ab ab ba "
     "ba ab ab ab ab ba ab ab ab ab ab ab ab ab ab ab ab ab ab ab ab ab ab ab ab ab ab ab ba ab "
     "ba ab ab ab ab ab ab ab ab ab ab ba aa ab ab ab aa aa ab ab ab ab aa ab ab aa ba ab ab aa "
     "ab aa ab ab ab ab ab ab ab ab ab ab ab ab ab ab ab ab aa ab ab ab ab ab ab ab ab aa ab ab "
     "ab ab aa aa ab ab ab ab ab aa ab aa aa ba ab ab aa ab aa ab ab ab ab ab ab ab ab ab ab ab "
     "ab ab ab ab ab aa ab ab ab aa ab "
    },
    {2,
     "aa ab ab aa ab ab ab ba ba ba ab ab ab ab ba aa aa ab aa ab ab aa ba ab ab ab aa ab ab ab "
     "aa ab ab aa ab aa ab ba ba ba ab ab ab ab ab aa ab ba ab ba ab ab ba ab ab ab ab ab ab ba "
     "ba ba ab ab ab ba ab ab ba ba ab ab ab ab ab ab ab ab ab ab ab ab ab ab ab ab aa ba ba ab "
     "ab ba ab ab ab aa ab aa ab ba ab aa ab aa ab ab ab ab ab aa ab ab ab ab ab ab ab aa ab ab "
     "ab ab ab ab ab ab ab ab ab ab ab ab ab ab ab ab ab ab ab ab ab ab ab ab ab ab ab ab ab ab "
     "ab ab ab ab ab ab ab ab ab ab aa aa ba ba ab ab aa aa ab ab ab ab ab ab ab ba ab ab ab ab "
     "ab ba ab aa aa ab ab ab ab ab ab "
    },
    {2,
     "aa ba ab aa aa ab ab ab ab ab aa ba ab ab ba aa aa aa bb bb ab ba ab aa ba ab bb aa ba ab "
     "ba ba ab aa ab ab aa aa aa ba aa ab ba ba ba ab ab ab aa ab ab bb ab ab ab aa ba ab ab ab "
     "aa ba ab ab ab aa ab ab ab ab aa ab ab aa ab ab ba ab ba ab ab ab aa ab ab ab ab ab aa ab "
     "ab ab ab ab ab ab ab ab ab ab ab ab ab ab aa ab ab ab ab ab ab ab aa ab ab aa ab ab ab aa "
     "ab ab ab ab ab ab ab ab ab ab ab ab ab ab ab ab ab ab ab ab ab ab ab ab ab ab ab ab ab ab "
     "ba ba ab ab ab ab ab ab ab ab ab aa ab ab ab ab ab aa ab ab ab aa ab ab ab ab ab ab aa ab "
     "ab ab aa ab ab aa ab aa aa ab ab "
    },
    {2,
     "aa ab ab ab aa aa aa ab ab ab ba ab ab aa ab ab ab ab ab aa aa ab ab ba ab ba ab ab aa ab "
     "ba aa ba ab ab ab ba ab aa ab aa aa ab aa ab aa ab aa ab ab ab ab ab ab ab aa ab ab aa aa "
     "ab aa ab aa aa ab aa ab ab ba ab ba ab aa aa aa ab ab ab ab aa ab ab ab ab aa aa ab ab ba "
     "ab ab ab ab ba ab aa ba ab ab aa ab ab ba aa ba aa ab ab aa aa ab ab aa aa ab ab ba ab aa "
     "ab aa ab ba ab ab aa ab ab ab aa aa aa ab ab ab ab aa ab ab aa aa ab ab ba ab ab aa ab aa "
     "ba ab ab ba ba ab ab ba ba aa ab aa ab ba ab ba ba ab ba ab ab ab ba aa aa ba aa ab ba ba "
     "ab ab ba ba ba ba ba ba ba ab ab "
    },
    {2,
     "aa aa ab aa aa ab ab ab ab ab aa ab aa ab ab ab ab ab ab ab aa ab ab aa ab ba ab aa aa ab "
     "ba ba ab ba ab aa ab ab ab aa ab ab ab ab ab ab ab ab ab ab ab aa ab aa aa aa ba ab ab ab "
     "aa aa aa aa ba ba aa ab ab aa ba aa aa ab aa ab ba aa ba bb ba ba ab ab aa ab ab ba ab ab "
     "ab ab ab ba bb ab ab aa ab bb aa ab ab aa ba ab ba aa ba ab ab ab aa ab ab aa ab ab ab aa "
     "ba ab ab ab ab aa ab aa ab ab ab ba ba ab ab ab aa ab ba ab aa ab ab ab ab ab ab ab aa ab "
     "ba ba ab ab bb aa ab ab ab ab ab ab ab ab ab ab ab ab ab ab ab ab aa ab ab ab ab ab ab ba "
     "aa ab ab ab ba aa ab ab ab aa ba "
    },
    {2,
     "aa ba ab ab aa aa aa ab ab ab ab aa ab ba ab ab ab ab ab ab aa ab ab ab ba ab ab ab ab ab "
     "ab aa ab ab ab aa ab ab ab ab ab aa ba ab ab ab ab ab aa ab ba ba ab ab ab ab ab ab ab ab "
     "ab ab aa ab aa ab aa aa ab ba ab ab ab ab ab ab ab ab ba ab ab ba ab ab ab ab ab ab ab ab "
     "ab ab ab ab ab aa ab ab ab ab ab ab ab ab ab ab aa ab ab ab ab ab ab ab ab ab aa ab ab ab "
     "ab ab ab ab ab ab ba ab ab ba ab ab ba ab ab ba ab ab ab aa ba ab ab aa ab ab ab ab ab ab "
     "aa ab ab aa aa ab ab ab ab ba ab ab ba ab ba ab ba ab ab ba ba ab ab ab ab ba aa ba ab ab "
     "aa ab ba ab ab ba ab ab ab "
    },
    {2,
     "aa aa aa aa ba ab ab ab ab aa ba ba ab aa ab ab ba aa ab aa aa ba ab bb ba ab ab ab aa aa "
     "ba ba ba ba ab ba ab ab ab ab ab ba ab ab ab ab ab aa aa ba ab aa ab ab ba aa ab ab aa ab "
     "ba ba ab ab ba ba ab ab aa ab aa ba ba ab ab ab ab aa ab ab ab ab ab ab ab ab ab aa ab ab "
     "ab ab ab ab ab ab ab ab ab ab ab aa ab ab aa ab aa ba ab ab ba aa ab ab ab ab ab ab ab ab "
     "aa ab ab ab ab ab ab ab ab ab ab ab ab ab ab ab ab ab ab aa ab ab ab ab ab ab ab ab aa ab "
     "ab ab aa ab ab ab ab ab ab ab ab ab ab ab ab ab aa ab ab ab ab aa ab ab aa ab ab ab ab ab "
     "ab ab ab ab ab ab ab ab ab ab ab "
    },
    {2,
     "aa ab aa ab ab ab aa ba ab ab ab aa ab ab aa ab ba ab ab ab ab ba ba aa ba ba ab aa ab ab "
     "ab aa aa ab ba aa ab ba ab ab ab aa aa ab ab ba ab ab ab ab ab ab ab ab ab ab ab ab ab ab "
     "ab ab ab ab ba ab aa ba ab ab ab ab aa ab ab ba ab ab ab aa ab ab ab ab aa ab ab ab ab ab "
     "ab ab ab ab ab ab ab ab ab aa ab ab ab ab ab ab ab ba ab aa ab ab ab ab ab ab ab ab ab ab "
     "ab ab ab ab ab ab ab ab ab ab ab ab ab ab ab ab ab ab aa ba ab ab ab ab ab ab ab ab ab ab "
     "ab ab ab ab aa ba ab ab ab ab aa aa ab ab ab aa ab ab ab ab ab ab ab ab aa aa ab ab ab ab "
     "aa ab ab ab ab ab ba ab ab ab ab "
    },
    {4,
     "aaaa baad abcd accb bada acbb bcba abcd acbd abcd abbd aaba abdb abdc baad aadb abcc acbd "
     "bdaa baac abdd acbd "
    },
    {4,
     "aaaa abca acbc acaa abcb adbb aabb aaba abca acdb abac acba acbd abac acaa abbc bbca acdd "
     "abbd aadc aaad acba cbbc acda abcb aabc aaac "
    },
    {4,
     "aaaa abad abba acab baaa aadc acbb caba baca acab bdac cabb cbaa cada baca abcb baac abcd "
     "abda abbc aadb abda abca bacd baac baad bacd badc bacd adda bcaa abcd cdaa abab bbcd adbb "
     "aaab dabb bcda "
    },
    {4,
     "aaaa acad abad abcc baac acbd aabd acdb bcad abcd abbc abcd abbc abaa aacb acbc aabc aaaa "
     "abac bcbc abcd abba cdaa bacc abcd abbc abad abcd abcd baac abcb abab adac aaaa abcb acbb "
     "abac abcd abdc "
    },
    {4,
     "aaaa accd abcc aaba abcb abca acbb acab aaba abcb aaba abcd bacd abcd abdc abcd abbc abdc "
     "abcb abcd abcd abcd aabc acbd abdc abcd abcd abcd abac abcd abcd abcd abac bacd bacd abcd "
     "bacd abcd bcaa bacd acdc abcd bcdc abcd abcd abdb abdb abca "
    },
    {4,
     "aaaa acbb acdb acdb aaba accb abac abaa abdc abcd acbd acbd adca adca abca acba acbd abcd "
     "abca abdc abcd aaba adcc aabc abcd aaac acbd abcd aabd aabd abad abcd abac abcd abcd abca "
     "aaba acbb abdd aaaa abcd aabc abcd abcd abac aabc aaaa aaba cbad "
    },
    {4,
     "aaaa aabb baab bacd abac abad abba abaa bcaa aaca badc abcd abac bbaa acaa acba dcab caca "
     "acaa acdd bdaa abda aaba accb aabd aaba abac abda abad cdab bcaa abdb abda aabc daca cadb "
     "abcd bcda bada aadc abbc aaad abaa abcd aaaa abac abad caad bbca dcba aaab abcd aaab aaab "
     "acbd babb abaa abbb cbbb aabc adba adcd aaba "
    },
    {4,
     "aaaa abaa cada abdb abbb baad bacd bacd abbc acbd abac aabc abbb abba abac abcd abcd acbb "
     "aabb abab caab baac adcc abcd bcad dbac daca baca dbac abcc aacb daaa badc acbd dabb abba "
     "baac adca abad abcd acac abdc abdc aaaa abac aabc abdb aada baba caad baad baac cabd acbd "
     "bcad baac acbd baac abdc abcd abdb aaab acab bcda bcaa cadb badc abcd bdaa "
    },
    {4,
     "aaaa aacd abbc abac abcd bdac abdc abdc abcd abac abcb aaaa aabc dabb bcad abcd abbc aaba "
     "abcb baac baca abcd abca aaab bada acda acdb abcd acab abdc adcb abca abdc abdc abcd aabc "
     "abdc acda baba bcda acdb abaa abaa cbad acdb acbd baac abdc baaa bcaa aacd aadc baad acbd "
     "aada aada acdb acda abac bcaa baca bcaa badc caba adbc acdb abca bcaa cadb "
    },
    {4,
     "aaaa adaa abdc acbb baac abab abcb abbc abcd abca abca aabb aaaa addb abcc abaa aaab aabc "
     "acbd abcd abcd abca abcd aabc abcd abcd abcd abcd acbd acbd acbd aaaa dbbc acab bdac cbaa "
     "aacc adbc aaaa abad caab abcd abab abcd abcd abcd abdc abac abcd abcd abcb abcd abac abac "
     "abcd abcd abcd abcd abcd abcd abcd abcd abcd abcd abcd abcd abcd abcd abcd abcd abcd abcd "
     "abcd baaa adbb abdc aaab daac abcd baca abcd abca aaba adcb acbd baad cbaa abdc abbc aabb "
     "aaba bcaa bdab abcd aacb cdba bada abcd adbc aaaa aadc adbc acba "
    },
    {4,
     "aaaa abcd abcd baca adbc abcd acbd caba abcc abbd aadc abcd aabc cdba acdb abdc abcd abcd "
     "acbd abcd abcd acbd abca abcd abcb abca abcd abcd abac aabb abcd abcd abdc aacb abdc acbd "
     "acaa badc bcdb bacd cadb abcd abcc bacc abbc abcd cabd cadb acbd baad abbd aacb abcd abcb "
     "abcd bacd aabc adac bdaa abcd abbc abcd abcd abcb abbd abab abcd aaac abcd abcd abaa abad "
     "abdc abcd abcd abcd abcd abcd aabb abca abca acbd abdb abcd aabc baca abcd acdb abcd acbb "
     "aabc abcd abcd abcb abcd abcd abcd abcd abca abac adbc abcd abdc abdc abdc aabc abcd abbc "
     "abcd abcd abcd abcd baac acbd acbd acab abcd abac abdc acdc caba acdb acbb abdc baac abcd "
     "adab abcd aaba acbb acbd adcb acda bacd bdba adbb abbd abda abcc baca acdb adbc cbad abcd "
     "abcd abcd baaa acbb acab abcd abcd acbb bcaa abcd abcc abdb abab aabc acbd acdc abca acbd "
     "aabc acdb abcd aabc acdb aaac abcc acba "
    },
    {4,
     "aaaa aabc aabb aaad abcc acbb cada acbd acab cabd acbb bdaa cbad cadb abcb acab bcda abab "
     "bcaa abcb abdc baca abcd baba badc aadc cabb adbb baca acbb bada caad acbc baaa bdaa adbc "
     "bdca daaa abca cbca bdac bbac acba bcab baca acbd abca baac abdc bcaa bcac bcaa acdb aadb "
     "bacd cdba bdac dbca bacd acab abaa abcd adbc abcd aacb abca acbd acad bacd aabc acdb acab "
     "adbc acad adbb abca bcaa abcd baca abcd cbda acdb cbad caba abdc bacd abdc bada abbc acba "
     "abad baba cbab abca abad aaab abab abab acbb abcc acab adbb abca acaa cada caba acbb baba "
     "baba dbca acdb abac cadb bacb daaa aabc cdba cbad dabc bdaa badc badc aadb bdac adcb adbc "
     "abdc aaaa abaa aacb aadc aabb bdca acbd aada acbd baca acbb aaca abdb acdb abcb bdaa caab "
     "bdca cabd bcda acad acbd abda abca abbc aaba abcd acbd acbb acad acbc accd aabc bacd abcd "
     "baac bacd bacd bacd abcd badc abcb aabc abcd acdb abcd acbb abca abcb abca abca abca abcd "
     "abcc abcb abca adbc baac aabd acda bada aacb acbc abdc "
    },
    {4,
     "aaaa abdc bcbb adbb adcb adcb acdb acdb abda abcd adbc abbb abad aaaa abad abac acbb aabd "
     "acdb aacb abdc bdaa aaca bcab baaa aabb abcd abdc aaab abcb aaca dcca bcaa abab acba aaba "
     "daba cada cabb caba aabc abdc aacb baca acaa bdcc adbc abbc abac caab cbac adbc abdc caba "
     "baad bcad badd caad baca abdb aaab abdc abcd aadc bcaa abcd caaa babd dbab aaca cacb acdb "
     "abdc bcad acbd abdc bada adcb bdca bdac bcad baad baad acdb aabc cdab cbba adcb abcd cabd "
     "bcda bacd bcda acdb bacd acbd cbdb abcc aabd cabd abcd abcd abcd abcd bcad abcd cabd bacd "
     "acbd cabd abcd abcd bacd abcd acbb acba bacd bcaa abcd abcd abcd abcc abcd abcd abcd abcd "
     "abca abca abcd aaba bacd abcd abcd bacd abcb bcad abcd abcd abcd abcd abdc abcd abcd abca "
     "abcd abcd abca aabb bcad abcd abcd abcd abcd abcd abcd abcd abcd abcd abcd abcd abcd abcd "
     "abcd abcd abcd abcd abcd abcd abcd abcd abcd abcd abcd abcd abcd abcd abcd abcd abda cadb "
     "cbda bacd abcd abcb bacd abcb abcd abcd abcd abcd abcd "
    },
    {4,
     "aaaa abcb aaab acad dbca dabb cbba bcaa abcd bcaa accb abcd acbb abab aadc abdb abbb aada "
     "cdaa abdd adaa aaab caab aabb aacc acba cada bcda abcd caba bcad caad bcda acdb acbd bcaa "
     "abdc bacc adcb acba acba acba abdc abca caab abbc abbc abcd acdd aaba acdb baaa adbc acdb "
     "abca adcb acdb dcac cbad abdc bcda acdb abcc baca abcd abcd abcc abcb abdc baad abdc abbc "
     "acbd acdb abcd abca abcd abca baca baaa abdc abad abcd abad abcd abcc abcd abdb abcd aabc "
     "abcd acdb abcd abca abad abcd abbc abca abdd abca abcd abaa abcd abad abcd abcd abcd abac "
     "abcd aabd abcd acbb acbd acda abcd aabc abcd acbd abdc abda abad abcb abdc abaa abcc abac "
     "abcd abaa abdc abac abcd abcd abcd abac abdc aabc abcd acbb abcd abdc abcd aabc abcd acbd "
     "abdc abdc aabd abcd acdb abca abcd abca abcd abca abcd abcd abcd abcd abcd abca abcd aabc "
     "abcd acdb abdc abdc abcd aabc acbd abdc abcd abca aabc acbd abdc abca abcd abca abcd abca "
     "abcd abcd abcd abcd abcd abca abcd abac abcd abdc abcd "
    },
    {4,
     "aaaa bada abcd abdc abcd baca abab abdc abbb acab aaaa abdc abaa aacb caab abcd caab baac "
     "abcd aadc cadb abca abab abcb aaca abdc abda baac cbab adbc daba bbcd caaa acbd adbb dacb "
     "adbb aabc abcd abdc bacd baaa aaba aacb caac aabd cbaa bdac bcda cdbb abcd acab bcac acbd "
     "aabc aaba abba daca abcd aabc abcc acaa aadc acdb cbad dbaa bcda adcd aaca acad acad caab "
     "dcab cabd abcc adaa bacd aadc acac abcb abbc dcaa abcd abcd acdb bcad badc bdca cbaa abcb "
     "abcb baca dcbb bcad cabb badc adca adcb aaab abcb aaab abdc acab abdc abdc aaab abcc aadb "
     "abaa bada bada adbc adba cbda acba acdb acbd abcc abcb baac acda abcd bbbc abcd abca abdd "
     "aaaa acdb abcd bcaa bcda acbd abdc aacb aaba abbd abcd abca abca acdb abcd aabc abcd abcd "
     "acbd aaab abdc abcd acdb abdc abcd aabb abaa baca bacd acda bdad aabd abba baaa abca baad "
     "abdd abaa abcb abcd abac abcd abad abcd abcd abdc abcd baac abac abcc abcd baca acbb abcd "
     "abca abaa abac abdc abcd abac abac abaa abcd abaa abcd "
    },
    {4,
     "aaaa abca acbb aabc abcd abcb abda badc badc bcad adcb acdb abcd adbc cbaa aadb cada baca "
     "abcd bcad bcaa adbb abdc abcd aaab baac abcd abcd abcd acbd acbd abcd abcd acbd abad adbc "
     "acdb adbb aabb abbd abcc aabb baaa acbd acbd abcd abcd abcd acad acbd acbd abdc adbc acda "
     "abbb aaac abcd baac abdc aabc abcd adbb abcd baaa abcb aacd abda abca aacb caab adbc bada "
     "abdb abcd acbb abcd abac abcd acdb bcda adcb aacd abcb cbaa aabd abcd abcd abcc abcb aaca "
     "abcb adcb abcd acbd acbd abcd abca abac abab acbd acbb abcd abda abac abcd abcd abcc abcd "
     "abca acbd abcd baca abcb abdc bada acbb abcd abcd abcd baac abcd acbd abcd abcd bdac abcd "
     "baac dcab adbb abcd bcad abcd bcad bcda abcd abcd abdc baac acbd cbaa abcd abcd abcd acbd "
     "abcd bacd abca bacd bacd abcd bcaa caba abcd bdac abdc daba abcd acba bcaa bcda abcd abcd "
     "baac abcd acbb aaba acbd bcaa abdc bcda abcd abcd abbd abcd bcaa abcd acbd abcb aabd abdc "
     "aaba abdc abdc bacd abcd abcd abdc abdc abbd abac abcd "
    },
    {4,
     "aaaa bcad abdd aada aaca abdd abcd adbc acba abdc aaaa baab adbb bacc acdb bccb bcaa bacc "
     "addc ccda abcd bcac abbd bcaa baaa abaa acaa dbac abca acdb aadc acab caab bcda abda baaa "
     "aaac aabb abdc aabb cbad abcd cdba abdc baab cabd abac acbd bcaa aaad abda ccaa baac baca "
     "abcd bcaa adbc abda baaa cdbb abcd abcd abab abcd abcd abcd abcd cadb acbd cdab abcd abcd "
     "abcd abcd abcd abcd abcd abdc abcd abcd abcd abab abcd abac abab abab abab abab abac cabd "
     "bcda abcd abcd adbc abcd abcd baac abdc aadb acdb abcd aaab adcc abcd abac acdb dbac bcad "
     "cadb acbd cabd abcd bcad abcc abca abcc bcaa abcd abcd abcd abac abdc abab abca cbaa abcd "
     "abcb abda abcd abcd abcd abcd abcd aabc acdb abcd baca abcd abcd acab abdc abcd abac abbb "
     "abcd aaaa abcd acad acbd cbaa abcd abcd abcd abcd abcd abcd bacd abcb abcd abcd abcd bacd "
     "bacd abca acbb abab abcd abdc acdb abac bdcc abdc abcd abcd abcd abcd abcd abcd abcd abcd "
     "abca abcd abcd abca abcc abca caaa dcbc bdca abcd abcd "
    },
    {4,
     "aaaa abcd abcd acbd aaab adca aacb abcd abca acdb bdca abcd abcc abcb abcd abcd abcd bacd "
     "abcd acba bcaa abcd cdab bacd abcd baac acba abcc abab acda bacc acad caab abcb abbc abcd "
     "bdaa abcd abaa abcd abac adba abcd baca abcd abcb bcad abad abdc abcd abdc abcb abcd abcd "
     "abcd abba abcd abcd abac abda abcd abca abcc abcd abca abcd caba abdc abcd cadb acdb bcaa "
     "abdc abab abab baab bacd abcd abcd abcd abba baac abcd abcd bada abbc aabb abcd bacd bdac "
     "abcd abcd acbd abcd bdac abcc acab cabd cbad cbda abad abcd acbd baac bcaa daba bada abcd "
     "acbd acba caab adba cbda abcd abcb caaa bdac cbda dcbb bcda adbc abca acbb baca abcd abcc "
     "acbb abca bacc baca acdb cdab bcda bada abcd bdac bacd abcd abcb acda acbb aacb bcda abdc "
     "bada abac abcd abcd bcaa baac abcd abbc daaa dbaa abdc acbd aabc abdc abdc bdac abdc abcd "
     "abca abcb cadb dbab abcd abcd abcd abdc bdaa aacb abac abdc acdb abba abcd abcd abcd abcd "
     "bcab bcad abcd baad abcd abcd acdb abcd abdc aaaa adbc "
    },
    {4,
     "aaaa daca baca cbad badc adcc aaba caab abcd abcd aaab abcd aabc abcc abcd abba abca abcd "
     "abcd abcd aaba acba acba aadb abac cbaa abcd abab aaca abcd daca abcb cabd bcda abac caab "
     "adca abcd aacb abcd abcd abcd abac abdc abcd abdc bada abcd abac abda cabd abba aabc acdb "
     "aabc acbd aaca acbd abdc abcb aaba adbc aadc baca abca abcd abbc abad abcb abca adbb acab "
     "abcd abca abcb aabc bcad abcd bacd bacd acab bcba bdab bacd acdb abdc baac aacb cdba bcad "
     "acdb cdaa caba abcd baca bdac acdb bcad cada abdc bcaa dcba adcb abcd bcaa baca acbd bcda "
     "bacd bacd baca abac abda abbc aabc abcc adab cbda abbc abab adba daab aabb cbab adaa bdac "
     "adba cdba cabd aabd accd acaa cdaa cdba bacd abdc aacb abac acbd abcd adbc abdc abcd abcb "
     "abdc bcda daba daca caab abbc abda abdc acbc aaaa acbd baaa bcad cbaa acdb baca abcd abcd "
     "abac abbc adac cabd bdaa bcda bacd bacd bcda caaa acdb abcd abdc abca aacd abdc aadc acdd "
     "bdaa caab cabb baca adbc baca accb aaac bdca abad acbb "
    },
    {4,
     "aaaa aaaa cabb adbc baac abbd abdb aaaa abdc aaab baac acdb daba acdb abcb abba abdc abaa "
     "abcd aaaa abcd aaaa abdc aaba abcd aabc abcd aacb abcd aabc abcd aabd abcd aabc abcd aadc "
     "abcd aacd abcd aacd abcd aacd abcd aacd abcd aacd abcd aacd abcd acad abcd abda abcd abac "
     "abcd abad abcd abda abcd abca abcd abca abcd abca abcd abca abcd abca abcd abca abcd abca "
     "abcd abca abcd abca abcd abca abcd abca abcd abca abcd abca abcd abca abcd abca abcd abca "
     "abcd abca abcd abca abcd abca abcd abca abcd abca abcd abca abcd baca abcd acbb abcd abcc "
     "abcd abcc abcd abcc abcd abcc abcd abcc abcd abcc abcd abcc abcd abcc abcd abcc abcd abcc "
     "abcd abcc abcd abcc abcd abcc abcd abcc abcd abcc abcd abcc abcd abcc abcd abcc abcd abcc "
     "abcd abcc abcd abcc abcd abcc abca abcc abca abcc abca abcc abca abcc abca abcc abca abcc "
     "abca abcc abca abcc abca abcc abca abcc abca abcc abca abcc abca abcd abca abcd abca abcd "
     "abca abcd abca abcd abca abcd abca abcd abca abcd abca "
    },
    {4,
     "aaaa aabd cada caab bcda abcd bcda baac abcd baac adcb aaab bacd bcad acbd abcd abcd abcd "
     "baca abcd abcd baac abbc bcaa acbd abcd abdc baca baad abcd abdc abcd abcd abdc abcc baaa "
     "baad abad abcb abcd baaa aaad acda adba abdc abbc abcd acbb abbc abdc aabc aaca acbd baab "
     "baac abca aaca acbb baaa daab baaa cada bacc bcaa adcb aacd abbd abac abbd baac badc abcd "
     "baca abca abcd abcd bcaa acdb abcd abcd abcd abcd abdc abcd abcd abcd abca baaa abcd abcb "
     "abcd baaa bacd abcd abcc abdc abac baac bacd acdb abcd abaa abcd bcda bcda abdc abcc aabb "
     "abcd abcd abcd abdc abcd abdc acdb abcd abcd abcd abcd abcd abcd abcd abcd abcc abcc abac "
     "abac abcd abab abcd abcd abcd abab abcd abcd abab acba abcd baca bdca acdb caba bcaa abcd "
     "abcd caab abdc abcd abac acbd acdb abca abcb abcd abcd abca abcd abcd abcd bacd bdaa abcd "
     "abcd aacb acdb abcd abcd abcd abcd abcd abcd abcd abcd abcd abcd abcd abcd abcd abcb abcd "
     "acbd acba acbd abcd abdc abac abcd abca abcd abdc acba "
    },
    {4,
     "aaaa abca aabc abca abcd abcc aaab bacd abcd abdc acdb abca abcd abcd aaac abda badc abca "
     "abdc acbd abca caba bcaa aabc bacd bcca cada bdab acda acdb abcd adab baad bdca cbaa bada "
     "acbd baad bcad bcad adcb abdc aabd aacb abdc acab acdb bacd adbb adbb aacb bcda badc abca "
     "baca bcad cdaa badc cadb badc baca acbd abcd bada abcd acbb aacd aaab acbd abcd abca abcd "
     "abcd acdb abac acdb adbc abcd acbd abcd abcd abcd abcd abcd abcc abac aaab bcad bacd abcd "
     "bcad acdb adcb abcd abcd abcd acbb aabc abcd abca aabb abcd aaac abda abcd abda abcc abcb "
     "abca abcd abcd abcd abcd adbc abdc aacb abcd bcda acbb acdb adcb adbc abcd aacd bcad cabd "
     "abdc abcd abcc abac baad abcd abcd abcd abcd abcd abcd acbb acdb cada abcd cbaa cdab bcda "
     "acbd abdc abdc abad acdd abcd abcc abad abcb abdc abaa aaba bcaa abdc abcd abcd abcd abcd "
     "abcd abcd abcb acdb abda abcd abdc abcd aabc abcd abcd abcd abcd abcd abcd acab aacd acbd "
     "abcd abcd acab adbc cdaa abcd abcd bcaa acbd acba bcda "
    },
    {4,
     "aaaa abda acda cbdc abcd abcd bcaa abcd baaa abbc abab abcd acbb abcd abcd abcd abac aaba "
     "aabd aacd abcd cbaa baab abcd abcc abcd abcd baba acbd abcb daba adaa abad adcb abda bcad "
     "acdb abcd abcd abcd abca abcd abcd aabc bdaa abcd abdc abdc abcc abac baaa bdca bcda acbd "
     "abcb abca aaaa abdc baac abcd abcd abcd abcd abcd abcd abcd abcd abcd badc abcd abcd abcd "
     "abcd abcd acbd baca abbd adbc abda abdc abcb abcd abcd abaa abac abdc acbd abcc abdc abac "
     "abaa aabd aabc cabb abcb acdb aacb acdb aabd abad abcd abca abcd abac aacb acdb abcd abcc "
     "abca abca abac aaba baaa abcc abcb adcb aabb acbb aabc aabc abcd abca abcd aabc aabc acdb "
     "abcd abcd abdc abac abaa aaba baaa abcd abcb adcb aabb acbb abac aabc abdc abca abcd aaba "
     "aabc acdb abcd abcd abaa abcd abaa aaba baaa abcc abcb adcb aabb abcb abca aabc abcd abcc "
     "abcd aaba abac abdc abcd abcd abaa abcd abaa aaba abbb abcd abcb adcb aabb abcb abca aabc "
     "abcd abcc abcd aaba abac abdc abcd abcd abaa abcd abac "
    },
    {4,
     "aaaa bacc abdb abbc aacb aaac aabc abbc abdc abdc abac aaba abac cbad bcac caba abac badc "
     "abcd acbd aabb abcd abcd abcd baca dacb abcd abdc abcd abcd abca abbd adbc abcd acad abcc "
     "acdb bcad acdb acbb abcd acbb bdac cabd bcad abcd abcc abcd acbb acbb acdb aaab abcd adac "
     "abca aaba acab acbd adcb abcd acba abcd acbd abdc aabb badc acbb dacb bacd acdb adcb acbd "
     "abcd abcd abcd abcd abcd abcd abcd abcd abcd abcd abcd abcd abca abcd abcc abcd abcd abcd "
     "abcd abcd abcd abcd abcd abca abcd abcd abcd abcd abcd abcd abcd abcd abcd acab abcd acdb "
     "abcd abcd abcd abcd abcd abcd abcd baad abcd abcd bcaa acdb abcd bcad baca acbb baca acbd "
     "acbd abcb aacb bcad abcd bacd abbb cdab bacd acbb abcd abcd abcd abdc abcd abcc abca baac "
     "acbd acba abca abcc acbd abcd abca acbd abcd acbd aaaa cbda abdc abdc baca bbaa cabb badc "
     "bcda bacd abcb abcd abcd abab acbb acbb caab abda baad abbc acbb abcc abdc abcd abac abca "
     "abdc abdc abcd abcd abaa abcd abcd abcd aaba abcc abcb "
    },
    {6,
     "aaaaaa baadbc abcdfa acfcbb baeaaa acbebd dbcbac bacdea adcbee adbcef accedf aabaed "
     "abdbbc abdccf beaead abdafc abdeeb adcbef dbeaaf acbbdb aaaabc deaacf ceabdd "
    },
    {6,
     "aaaaaa abcacb aecbcf adafba abcbdf adbeba aafdbb aabcaa abcaab acdffb abacaa acbaeb "
     "acbdbb abacaa aceaad abccbd bdbcea abedfd abdccf aacbce aaaedf acbdea cbbecc aceaff "
     "abcbac aaebcc acaade "
    },
    {6,
     "aaaaaa acadbb abaedf abcddc baaced acbdef aabdcf acdbef bceada abcded acbbdf abcdef "
     "abccdf abcaab ababdc abdece abbacd abcaaa adbace bdbdef abcdca abbaab cdefaa badcee "
     "acbdef abdcce badcac bacdfe abcdef cdabab adbcef acbdba abeacb baaabb abcdfe abdccf "
     "abcbda abcdef abceda ababba adefbc "
    },
    {6,
     "aaaaaa accedf abdcce aacbaf abcdfb abcdec acdbef abdaec aabcea acbedb aacbad abdcfe "
     "bacdef abcedf abcfde abcdee abbdcb abdecc abcdbf abcded abcdef abcdef aabcad acbdbf "
     "abdfec abcdef abcdde abcefa abacbd abcdef abcdfe abcdec abacdd bacdae bacdfe abcdef "
     "bacdea abcdef bcaadd bacedf acedfc abcdef bdcefc abcdef abcdef abcdfc abcdfc abceda "
    },
    {6,
     "aaaaaa afcbba abdefc aedfcb aacaea aecfcb abcaea acabaa abdedc abedcf aedcbf adecfb "
     "abedac abedfa abcdea abbbdc abdfce abdefc acdbbb abfcde abedfa aabaaa adccbf aabcaa "
     "abcdfe aaacda acbedf abcdef aabdec aabdec abdfae abcdef abacde abcdef abcdef abdeca "
     "aabcae acbbfb abeddc aaaaaa abcdfe aabcae abcdef abcdfe abacda aabcde aaaaad aaebac "
     "dbaecc "
    },
    {6,
     "aaaaaa abaaab cadaef abdfbc dabbbc cbabfe badcfd bacfea abdbce adcbce abaedf aabdcb "
     "abbbef abbaba abacda abcdef abcdef acbbdd aabbcd ababcb caabdd baacdc adccbb abcdea "
     "bcaedb ebacfa daefca cdbaea bfdaaa bcdaac adcacb cbfbaa aedbac aecbad ebdfba abeacc "
     "aadbcd abcabf addbbe aacbaa aabcde abcacf abadba ababfa eabbad bacfde bacadc aabdbf "
     "ceabad cadbad badeac acbbed abfdca abaaea bacdfd aabbcb baafbf abbbad acbdeb ceaedb "
     "abcdcd aaadaa aabcda adecfb "
    },
    {6,
     "aaaaaa aacdba abbced abacfd abcdef bdacae abdcfb abdcae abecdf abcacd abcdba aacaaa "
     "aabdca dabbca bcadfe abcefd abebdc aacbad abdccf baaced bacadf abcdea abcafe aafabc "
     "bacefa adfcac acdfeb abcdef acdeab abdfec abedfc abcdae abcedd acebdb abcfed aabcbf "
     "abdcaa acdaeb babaaa bcfdae adcfce abcdea abcada dbafbe acedbb acdbeb cabfad adbfec "
     "bcbfaa eadacc abafce aabdec baafed acbdeb aaabcc aaecab adebcc acdabb abacfc bcaeaf "
     "bacadc bcaaac badccf cabaad adebcf adefbc abcdae bcaaad ceadbd "
    },
    {6,
     "aaaaaa abdaeb acfdea dbfdec abcdfe abcdae bceaad abccde badcaa abbebb ababde abcdef "
     "acebbd abcdef abdfce abcedf abadce aabaac aabdce aacdfb abcdea cbaade baabdc abcded "
     "abccdd abcdea abcdfe babaaa acbedb abcbac defaba abcfaa badbac abfdec abcfba dbaeba "
     "bcdefa acbedf abdcec abcdfd abcabc abcedd abceff ababcc bcfdaa abcefe abcdfe abcdef "
     "abcdee abcbbc abdcae baceca dacbfe dbeafc abfade abcdeb abdcae bacdab aceacd abeabf "
     "baaebd bcdfea abcfdc abaceb abaaab abcdef bcaedf abdcef abcefd abcdef abcdef abcdea "
     "abcdeb abcdeb abcdef abcdeb abcdfe aabacb acefaa aabaae aaaaca abaeba abfcde aaabde "
     "acdbba bacade abcdea acfadb "
    },
};
const int32_t sim_n_beam_records = (int32_t)ARRAY_LEN(sim_beam_records);

const int16_t sim_prompt_lengths[] = {
    15, 16, 17, 17, 18, 19, 20, 20, 20, 20, 21, 21, 22, 22, 22, 22, 23, 23, 23, 23, 23, 24,
    24, 24, 25, 26, 26, 27, 28, 28, 28, 29, 30, 31, 31, 32, 33, 35, 35, 37, 37, 38, 38, 39,
    41, 42, 42, 42, 45, 48, 48, 50, 51, 55, 56, 60, 65, 69, 75, 92, 97, 111, 125, 140, 147,
    153, 191, 254, 325, 1329,
};
const int16_t sim_output_lengths[] = {
    2, 2, 3, 14, 15, 17, 18, 20, 22, 24, 25, 26, 31, 36, 52, 53, 55, 56, 56, 58, 68, 82, 87,
    89, 92, 95, 127, 129, 165, 176, 178, 198, 199, 216, 241, 303, 304, 314, 356, 419, 429,
    446, 459, 476, 521, 538, 557, 576, 596, 618, 640, 663, 688, 714, 742, 771, 803, 837, 874,
    915, 959, 1009, 1024, 1024, 1024, 1024, 1024, 1024, 1024, 1024,
};
const int32_t sim_n_lengths = (int32_t)ARRAY_LEN(sim_prompt_lengths);
