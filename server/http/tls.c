/* The list of certificate pairs: the newest is in use, older ones are kept (see
 * tls.h). */
#include "server/http/tls.h"

#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "config/base/buf.h"
#include "config/base/limits.h"

enum { CHAIN_MAX = 16 }; /* certificates of a chain */

struct pair {
    struct pair *older;
    char *pem; /* the text of both files, to detect changes */
    gnutls_pcert_st cert[CHAIN_MAX];
    unsigned n_certs;
    gnutls_privkey_t key;
};

static struct pair *_Atomic current; /* the newest; older ones are linked by `older` */

static void pair_free(struct pair *p)
{
    for (unsigned i = 0; i < p->n_certs; i++) {
        gnutls_pcert_deinit(&p->cert[i]);
    }
    if (p->key) {
        gnutls_privkey_deinit(p->key);
    }
    free(p->pem);
    free(p);
}

static int refuse(struct err *e, const char *param, const char *path, int rc)
{
    return err_set_param(e, ERR_INVALID, param, "%s '%s': %s", param, path, gnutls_strerror(rc));
}

static int read_certs(struct pair *p, const struct buf *text, const char *path, struct err *e)
{
    gnutls_datum_t pem = {(unsigned char *)text->data, (unsigned)text->len};
    unsigned n = CHAIN_MAX;
    int rc = gnutls_pcert_list_import_x509_raw(p->cert, &n, &pem, GNUTLS_X509_FMT_PEM, 0);

    if (rc < 0) {
        return refuse(e, "ssl_certfile", path, rc);
    }
    p->n_certs = n;
    return 0;
}

static int read_key(struct pair *p, const struct buf *text, const char *path, struct err *e)
{
    gnutls_datum_t pem = {(unsigned char *)text->data, (unsigned)text->len};
    int rc = gnutls_privkey_init(&p->key);

    rc = rc < 0 ? rc : gnutls_privkey_import_x509_raw(p->key, &pem, GNUTLS_X509_FMT_PEM, NULL, 0);
    return rc < 0 ? refuse(e, "ssl_keyfile", path, rc) : 0;
}

/* A key that does not belong to the certificate would fail every handshake. */
static int check_match(const struct pair *p, const struct settings *s, struct err *e)
{
    gnutls_pubkey_t public;
    unsigned char of_cert[64], of_key[64];
    size_t n_cert = sizeof(of_cert), n_key = sizeof(of_key);
    int rc = gnutls_pubkey_init(&public);

    if (rc < 0) {
        return err_nomem(e, "a certificate");
    }
    rc = gnutls_pubkey_import_privkey(public, p->key, 0, 0);
    rc = rc < 0 ? rc : gnutls_pubkey_get_key_id(public, GNUTLS_KEYID_USE_SHA256, of_key, &n_key);
    rc = rc < 0 ? rc
                : gnutls_pubkey_get_key_id(p->cert[0].pubkey, GNUTLS_KEYID_USE_SHA256, of_cert,
                                           &n_cert);
    gnutls_pubkey_deinit(public);
    if (rc < 0) {
        return refuse(e, "ssl_keyfile", s->ssl_keyfile, rc);
    }
    if (n_cert != n_key || memcmp(of_cert, of_key, n_key) != 0) {
        return err_set_param(e, ERR_INVALID, "ssl_keyfile",
                             "ssl_keyfile '%s' is not the key of ssl_certfile '%s'", s->ssl_keyfile,
                             s->ssl_certfile);
    }
    return 0;
}

static int read_file(struct buf *ret, const char *param, const char *path, struct err *e)
{
    int rc = buf_read_file(ret, path, e);

    if (rc) {
        return err_prefix(e, "%s", param);
    }
    return ret->len ? 0 : err_set_param(e, ERR_INVALID, param, "%s '%s' is empty", param, path);
}

static int pair_read(struct pair *p, const struct settings *s, struct err *e)
{
    struct buf cert, key;

    buf_init(&cert, LIMIT_YAML_BYTES);
    buf_init(&key, LIMIT_YAML_BYTES);
    int rc = read_file(&cert, "ssl_certfile", s->ssl_certfile, e);
    rc = rc ? rc : read_file(&key, "ssl_keyfile", s->ssl_keyfile, e);
    rc = rc ? rc : read_certs(p, &cert, s->ssl_certfile, e);
    rc = rc ? rc : read_key(p, &key, s->ssl_keyfile, e);
    rc = rc ? rc : check_match(p, s, e);
    if (rc == 0 && asprintf(&p->pem, "%s\n%s", cert.data, key.data) < 0) {
        p->pem = NULL;
        rc = err_nomem(e, "a certificate");
    }
    if (key.data) {
        explicit_bzero(key.data, key.len);
    }
    buf_release(&cert);
    buf_release(&key);
    return rc;
}

int tls_load(const struct settings *s, bool *ret_changed, struct err *e)
{
    struct pair *p = calloc(1, sizeof(*p)), *before = atomic_load(&current);
    int rc = p ? pair_read(p, s, e) : err_nomem(e, "a certificate");
    bool same = rc == 0 && before && strcmp(before->pem, p->pem) == 0;

    if (p && (rc || same)) {
        pair_free(p);
    }
    if (rc == 0 && !same) {
        p->older = before;
        atomic_store(&current, p);
    }
    if (rc == 0 && ret_changed) {
        *ret_changed = !same;
    }
    return rc;
}

void tls_release(void)
{
    for (struct pair *p = atomic_exchange(&current, NULL), *older; p; p = older) {
        older = p->older;
        pair_free(p);
    }
}

int tls_retrieve(gnutls_session_t session, const gnutls_datum_t *authority, int n_authorities,
                 const gnutls_pk_algorithm_t *algorithm, int n_algorithms,
                 gnutls_pcert_st **ret_cert, unsigned *ret_n_certs, gnutls_privkey_t *ret_key)
{
    struct pair *p = atomic_load(&current);

    (void)session, (void)authority, (void)n_authorities, (void)algorithm, (void)n_algorithms;
    if (!p) {
        return -1;
    }
    *ret_cert = p->cert;
    *ret_n_certs = p->n_certs;
    *ret_key = p->key;
    return 0;
}
