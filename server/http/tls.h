/* The certificate and key that TLS shows, which SIGHUP replaces.
 *
 * libmicrohttpd 0.9.75 keeps what MHD_OPTION_HTTPS_MEM_CERT gave it for good, but asks
 * MHD_OPTION_HTTPS_CERT_CALLBACK at every handshake. GnuTLS does not copy what that
 * answers, so a pair that was shown once stays until the end: a few KB for every new
 * certificate.
 */
#ifndef QUIRE_SERVER_HTTP_TLS_H
#define QUIRE_SERVER_HTTP_TLS_H

#include <gnutls/abstract.h>

#include "config/settings/settings.h"

/* Read the files of the settings and show them from the next handshake on. On failure
 * what was shown stays. */
int tls_load(const struct settings *s, bool *ret_changed, struct err *e);
void tls_release(void);
/* The callback: a gnutls_certificate_retrieve_function2. It is given nothing to find a
 * server by, so there is one pair. */
int tls_retrieve(gnutls_session_t session, const gnutls_datum_t *authority, int n_authorities,
                 const gnutls_pk_algorithm_t *algorithm, int n_algorithms,
                 gnutls_pcert_st **ret_cert, unsigned *ret_n_certs, gnutls_privkey_t *ret_key);

#endif
