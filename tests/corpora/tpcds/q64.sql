-- Items that sell again a year later at the same store: eighteen tables, then a self join.
with catalog as (
  select
    cs_item_sk,
    sum(cs_ext_list_price) as sale,
    sum(cr_refunded_cash + cr_reversed_charge + cr_store_credit) as refund
  from catalog_sales
  join catalog_returns on cr_item_sk = cs_item_sk and cr_order_number = cs_order_number
  group by cs_item_sk
  having sum(cs_ext_list_price)
    > 2 * sum(cr_refunded_cash + cr_reversed_charge + cr_store_credit)
),
crossed as (
  select
    i_product_name as product_name, i_item_sk as item_sk, s_store_name as store_name,
    s_zip as store_zip, bought.ca_street_number as b_street_number,
    bought.ca_street_name as b_street_name, bought.ca_city as b_city, bought.ca_zip as b_zip,
    home.ca_street_number as c_street_number, home.ca_street_name as c_street_name,
    home.ca_city as c_city, home.ca_zip as c_zip, sold.d_year as syear,
    first_sale.d_year as fsyear, first_shipped.d_year as s2year, count(*) as cnt,
    sum(ss_wholesale_cost) as s1, sum(ss_list_price) as s2, sum(ss_coupon_amt) as s3
  from store_sales
  join store_returns on sr_item_sk = ss_item_sk and sr_ticket_number = ss_ticket_number
  join catalog on cs_item_sk = ss_item_sk
  join date_dim as sold on sold.d_date_sk = ss_sold_date_sk
  join store on s_store_sk = ss_store_sk
  join customer on c_customer_sk = ss_customer_sk
  join date_dim as first_sale on first_sale.d_date_sk = c_first_sales_date_sk
  join date_dim as first_shipped on first_shipped.d_date_sk = c_first_shipto_date_sk
  join customer_demographics as cd1 on cd1.cd_demo_sk = ss_cdemo_sk
  join customer_demographics as cd2 on cd2.cd_demo_sk = c_current_cdemo_sk
  join promotion on p_promo_sk = ss_promo_sk
  join household_demographics as hd1 on hd1.hd_demo_sk = ss_hdemo_sk
  join household_demographics as hd2 on hd2.hd_demo_sk = c_current_hdemo_sk
  join customer_address as bought on bought.ca_address_sk = ss_addr_sk
  join customer_address as home on home.ca_address_sk = c_current_addr_sk
  join income_band as ib1 on ib1.ib_income_band_sk = hd1.hd_income_band_sk
  join income_band as ib2 on ib2.ib_income_band_sk = hd2.hd_income_band_sk
  join item on i_item_sk = ss_item_sk
  where cd1.cd_marital_status <> cd2.cd_marital_status
    and i_color in ('purple', 'burlywood', 'indian', 'spring', 'floral', 'medium')
    and i_current_price between 64 and 64 + 10
    and i_current_price between 64 + 1 and 64 + 15
  group by
    i_product_name, i_item_sk, s_store_name, s_zip, bought.ca_street_number,
    bought.ca_street_name, bought.ca_city, bought.ca_zip, home.ca_street_number,
    home.ca_street_name, home.ca_city, home.ca_zip, sold.d_year, first_sale.d_year,
    first_shipped.d_year
)
select
  a.product_name, a.store_name, a.store_zip, a.b_street_number, a.b_street_name, a.b_city,
  a.b_zip, a.c_street_number, a.c_street_name, a.c_city, a.c_zip, a.syear, a.cnt, a.s1, a.s2,
  a.s3, b.s1 as next_s1, b.s2 as next_s2, b.s3 as next_s3, b.syear as next_syear,
  b.cnt as next_cnt
from crossed as a
join crossed as b
  on b.item_sk = a.item_sk and b.store_name = a.store_name and b.store_zip = a.store_zip
where a.syear = 1999 and b.syear = 1999 + 1 and b.cnt <= a.cnt
order by a.product_name, a.store_name, b.cnt, a.s1, b.s1
