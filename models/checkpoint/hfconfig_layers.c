/* What hfconfig.c reads of rotations that differ from layer to layer. */
#include <math.h>

#include "models/checkpoint/hfconfig_internal.h"

static const char CONFIG[] = "config.json", KEY[] = "layer_rope_theta";

bool raw_thetas_read(struct json *j, struct raw_config *raw)
{
    double theta = 0;

    if (json_peek(j) != JSON_ARRAY) {
        return json_fail(j, "%s must be a list of numbers, not %s", KEY,
                         json_type_name(json_peek(j)));
    }
    raw->n_thetas = 0;
    json_enter_array(j);
    while (json_next_element(j)) {
        if (raw->n_thetas == LIMIT_LAYERS) {
            return json_fail(j, "%s has more than %d entries", KEY, LIMIT_LAYERS);
        }
        if (json_peek(j) != JSON_NUMBER) {
            return json_fail(j, "%s must be a list of numbers", KEY);
        }
        if (!json_read_double(j, &theta)) {
            return false;
        }
        if (theta != 0 && !(theta >= 1 && theta <= 1e12)) {
            return json_fail(j, "%s has %g, allowed are 0 and 1 to 1e12", KEY, theta);
        }
        raw->layer_theta[raw->n_thetas++] = theta;
    }
    return !j->failed;
}

/* The theta of the layers that have a window, or have none, and rotate; 0: none
 * does, -1: they differ. */
static double theta_of(const struct model_config *c, const struct raw_config *r, bool windowed)
{
    double theta = 0;

    for (int32_t i = 0; i < c->n_layers; i++) {
        double mine = r->layer_theta[i];
        if (c->windowed[i] != windowed || mine == 0) {
            continue;
        }
        if (theta != 0 && mine != theta) {
            return -1;
        }
        theta = mine;
    }
    return theta;
}

int raw_thetas_derive(struct model_config *c, const struct raw_config *r, struct err *e)
{
    if (r->n_thetas < 0) {
        return 0;
    }
    if (r->n_thetas != c->n_layers) {
        return err_set(e, ERR_INVALID, "%s: %s has %d entries for num_hidden_layers %d", CONFIG,
                       KEY, r->n_thetas, c->n_layers);
    }
    double full = theta_of(c, r, false), windowed = theta_of(c, r, true);
    if (full < 0 || windowed < 0) {
        return err_set(e, ERR_UNSUPPORTED,
                       "%s: %s differs between layers of one kind of attention, which is not "
                       "supported",
                       CONFIG, KEY);
    }
    bool both = full > 0 && windowed > 0 && full != windowed;
    if (both && c->rope.kind != ROPE_DEFAULT) {
        return err_set(e, ERR_UNSUPPORTED, "%s: %s with two bases and a scaling is not supported",
                       CONFIG, KEY);
    }
    for (int32_t i = 0; i < c->n_layers; i++) {
        c->unrotated[i] = r->layer_theta[i] == 0;
    }
    c->window_theta = both ? windowed : 0;
    if (full > 0 || windowed > 0) {
        c->rope.theta = full > 0 ? full : windowed;
    }
    return 0;
}
