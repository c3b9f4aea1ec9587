/* What a hub answers about a model, and names of models. */
/* covers: models/hub/hub_listing.c models/hub/hub.c */
#include <stdlib.h>
#include <string.h>

#include "models/hub/hub.h"
#include "models/hub/hub_internal.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t len);

static void check_file(const struct hub_file *f)
{
    bool plain = hub_file_name_ok(f->name) && !strchr(f->name, '/');

    if (!(plain || hub_gguf_name_ok(f->name)) || f->name[0] == '/' ||
        strstr(f->name, "..") == f->name || strstr(f->name, "/.") || f->n_bytes < 0 ||
        strlen(f->oid) != (f->lfs ? 64 : 40) ||
        strspn(f->oid, "0123456789abcdef") != strlen(f->oid)) {
        __builtin_trap();
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t len)
{
    struct hub_listing l = {0};
    struct hub_name n;
    struct err e = {0};
    char *text = malloc(len + 1);

    if (!text) {
        return 0;
    }
    memcpy(text, data, len);
    text[len] = '\0';
    if (hub_name_parse(&n, text, &e) == 0 &&
        (strstr(n.repo, "..") || strstr(n.revision, "..") || n.file[0] == '.')) {
        __builtin_trap();
    }
    free(hub_name_of_path(text));
    e = (struct err){0};
    int rc = hub_listing_parse(&l, text, len, &e);
    if (rc < 0 && (e.code >= 0 || e.text[0] == '\0')) {
        __builtin_trap(); /* a refusal without its sentence */
    }
    for (int32_t i = 0; i < l.n_files; i++) {
        check_file(&l.file[i]);
    }
    hub_listing_gguf(&l);
    hub_listing_release(&l);
    free(text);
    return 0;
}
