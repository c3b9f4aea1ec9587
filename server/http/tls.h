/* The certificate and key of the TLS listener, replaced on SIGHUP.
 *
 * libmicrohttpd 0.9.75 cannot replace a certificate given by MHD_OPTION_HTTPS_MEM_CERT,
 * but calls MHD_OPTION_HTTPS_CERT_CALLBACK at every handshake. GnuTLS does not copy
 * what the callback returns, so each pair that was in use is kept until tls_release: a
 * few KB per certificate.
 */
#ifndef QUIRE_SERVER_HTTP_TLS_H
#define QUIRE_SERVER_HTTP_TLS_H

#include <gnutls/abstract.h>

#include "config/settings/settings.h"

/* Read the files named by the settings and use them from the next handshake on. On
 * failure the pair in use stays. *ret_changed (may be NULL): the files differ from
 * it. */
int tls_load(const struct settings *s, bool *ret_changed, struct err *e);
void tls_release(void);
/* The callback, a gnutls_certificate_retrieve_function2. It has no argument that could
 * name a server, so the pair in use is global. */
int tls_retrieve(gnutls_session_t session, const gnutls_datum_t *authority, int n_authorities,
                 const gnutls_pk_algorithm_t *algorithm, int n_algorithms,
                 gnutls_pcert_st **ret_cert, unsigned *ret_n_certs, gnutls_privkey_t *ret_key);

#endif
