/* GPT-2's own two files, for directories without a tokenizer.json: vocab.json (tokens
 * and ids) and merges.txt (a version line, then a merge on each line). The encoding is
 * byte-level BPE, split by GPT-2's expression; <|endoftext|> is BOS and EOS.
 */
#include "models/tokenizer/tokenizer_internal.h"

#include <stdlib.h>
#include <string.h>

#include "models/checkpoint/file.h"

static int add_line(struct tokenizer *t, const char *line, size_t len, struct err *e)
{
    char whole[2 * TOKEN_TEXT_BYTES];
    const char *space = memchr(line, ' ', len);

    if (!space || len > sizeof(whole)) {
        return err_set(e, ERR_INVALID,
                       "merges.txt: \"%.*s\" is not two tokens with a space between",
                       (int)MIN(len, (size_t)60), line);
    }
    size_t left_len = (size_t)(space - line), right_len = len - left_len - 1;
    memcpy(whole, line, left_len);
    memcpy(whole + left_len, space + 1, right_len);
    int32_t left = vocab_find(t, line, left_len), right = vocab_find(t, space + 1, right_len);
    int32_t id = vocab_find(t, whole, left_len + right_len);
    if (left < 0 || right < 0 || id < 0) {
        return err_set(e, ERR_INVALID, "merges.txt: a token of \"%.*s\" is not in vocab.json",
                       (int)MIN(len, (size_t)60), line);
    }
    return bpe_add_merge(&t->bpe, left, right, id, (int32_t)t->bpe.n) == 0
               ? 0
               : err_nomem(e, "the merges");
}

static int read_merges_file(struct tokenizer *t, const char *dir, struct err *e)
{
    char *text = NULL;
    size_t len = 0;
    int rc = model_file_read(dir, "merges.txt", LIMIT_TOKENIZER_JSON_BYTES, &text, &len, e);

    if (rc == 0 && !utf8_valid(text, len)) {
        rc = err_set(e, ERR_INVALID, "merges.txt is not UTF-8");
    }
    for (char *line = text, *end; rc == 0 && line < text + len; line = end + 1) {
        end = memchr(line, '\n', (size_t)(text + len - line));
        end = end ? end : text + len;
        size_t n = (size_t)(end - line) - (end > line && end[-1] == '\r');
        if (n > 0 && !(line == text && line[0] == '#')) {
            rc = add_line(t, line, n, e);
        }
    }
    free(text);
    return rc;
}

static int read_vocab_file(struct tokenizer *t, const char *dir, struct err *e)
{
    struct err own = {0};
    struct json j;
    char *text = NULL;
    size_t len = 0;

    e = e ? e : &own;
    int rc = model_file_read(dir, "vocab.json", LIMIT_TOKENIZER_JSON_BYTES, &text, &len, e);
    if (rc == 0) {
        json_init(&j, text, len, "vocab.json", e);
        read_vocab(&j, t);
        json_finish(&j);
        rc = j.failed ? e->code : 0;
    }
    free(text);
    return rc;
}

int tokenizer_open_gpt2(struct tokenizer *t, const char *dir, struct err *e)
{
    static const char END[] = "<|endoftext|>";
    static const struct decoder DECODER = {.step = {{.kind = DECODER_BYTE_LEVEL}}, .n = 1};

    t->bos = t->eos = t->bpe.unk = -1;
    t->model = MODEL_BPE;
    t->bpe.byte_level = true;
    int rc = read_vocab_file(t, dir, e);
    if (rc == 0) {
        rc = read_merges_file(t, dir, e);
    }
    if (rc == 0) {
        t->n_stages = 1;
        t->stage[0].behavior = SPLIT_ISOLATED;
        rc = pattern_compile(&t->stage[0].pattern, GPT2_PATTERN, strlen(GPT2_PATTERN), e);
    }
    struct added_token end = {.id = vocab_find(t, END, sizeof(END) - 1)};
    if (rc == 0 && end.id >= 0) {
        t->bos = t->eos = end.id;
        rc = added_add(t, &end, END, sizeof(END) - 1, true, e);
    }
    if (rc == 0) {
        rc = bpe_finish(t, e);
    }
    if (rc == 0) {
        rc = added_finish(t, e);
    }
    return rc == 0 ? decoder_apply(&DECODER, t, e) : rc;
}
